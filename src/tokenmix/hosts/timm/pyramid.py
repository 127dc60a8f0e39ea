"""Provide the papers' pyramids in ``timm.create_model``: our ``Pyramid`` with the methods of a timm backbone.

Its weights have the names of our ``Pyramid``, so files of ``tokenmix train`` load.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...errors import MixerError
from ...models import MODELS, Pyramid, PyramidConfig
from ...models.blocks import Block
from ...models.layers import init_linear
from ...models.pyramid import Stage
from ...types import Options, Spec
from ..patch_grid import Grid
from .attention import trace_module
from .metadata import describe_model
from .scripted import ScriptedBlock, ScriptedModel, TypedForward

POOLS = {"token": "class", "avg": "mean", "": "mean"}


@register_notrace_module
class PyramidBlock(Block):
    """A block that torch.fx takes as one node, and torch.jit.script as a trace for the grid it is built for.

    Args:
        dim, spec, options: as in ``Block``.
        grid: (rows, columns) of its stage.
        max_len: tokens of its stage, those of the grid and a class token.
    """

    def __init__(self, dim: int, spec: Spec, *, grid: Grid, max_len: int, **options: Any):
        super().__init__(dim, spec, grid=grid, max_len=max_len, **options)
        self.grid, self.prefix = grid, max_len - prod(grid)

    def __prepare_scriptable__(self) -> nn.Module:
        """Trace the block for any number of images."""
        weight = self.mixer_norm.weight
        tokens = self.prefix + prod(self.grid)
        x = torch.randn(2, tokens, self.mixer.dim, device=weight.device, dtype=weight.dtype)
        return ScriptedBlock(trace_module(_OnGrid(self), x), self.grid, self)


class _OnGrid(nn.Module):
    """The block that is traced, with its grid."""

    def __init__(self, block: PyramidBlock):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, grid=self.block.grid, prefix=self.block.prefix)


class PyramidStage(Stage):
    """A stage whose blocks know their grid."""

    block_class = PyramidBlock

    def resize_positions(self, old: Grid, new: Grid) -> None:
        """Interpolate the positions, and tell the blocks their new grid."""
        super().resize_positions(old, new)
        for block in self.blocks:
            block.grid = new


class MixerPyramid(TypedForward, Pyramid):
    """A pyramid of stages with the interface of timm's hierarchical backbones.

    Args:
        config: values for what the arguments below leave open.
        img_size, in_chans, num_classes, drop_rate, drop_path_rate: as in timm.
        global_pool: "token", a class token in the last stage; "avg", the mean of the last map; or "", the map itself.
        mixers: as in ``PyramidConfig``; a single spec need not be in a list.
        depths, dims, patches, mlp_ratios: as in ``PyramidConfig``.
        device, dtype: of the parameters.
    """

    stage_class = PyramidStage

    def __init__(
        self,
        config: PyramidConfig,
        *,
        img_size: int | tuple[int, int] | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ):
        _check_pool(global_pool)
        if isinstance(fields.get("mixers"), dict):
            fields["mixers"] = (fields["mixers"],)
        size: Options = {} if img_size is None else {"image_size": img_size}
        head: Options = {"channels": in_chans, "classes": num_classes, "pool": POOLS[global_pool]}
        super().__init__(replace(config, **size, **head, dropout=drop_rate, drop_path=drop_path_rate, **fields))
        self.to(device=device, dtype=dtype)
        self.num_classes, self.in_chans, self.global_pool = num_classes, in_chans, global_pool
        self.num_features = self.head_hidden_size = self.config.dims[-1]
        self.grad_checkpointing = False
        per_stage = zip(self.config.dims, self.config.strides, strict=True)
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": dim, "reduction": stride} for i, (dim, stride) in enumerate(per_stage)
        ]

    def no_weight_decay(self) -> set[str]:
        """Return parameters outside linear layers and convolutions: positions, class token, those of mixers."""
        weights = (nn.Linear, nn.Conv1d, nn.Conv2d)
        own = ((name, module) for name, module in self.named_modules() if not isinstance(module, weights))
        return {
            f"{name}.{leaf}" if name else leaf
            for name, module in own
            for leaf, _ in module.named_parameters(recurse=False)
        }

    def group_matcher(self, coarse: bool = False) -> dict[str, str | list[tuple[str, tuple[int, ...] | None]]]:
        """Return the layers for layer decay: the stages, or every block."""
        if coarse:
            return {
                "stem": r"^stages\.0\.(?:patch|positions)",
                "blocks": [(r"^stages\.(\d+)", None), (r"^norm", (99999,))],
            }
        inner = r"^stages\.(\d+)\.(?:patch|positions|class_token)"
        return {
            "stem": r"^stages\.0\.(?:patch|positions)",
            "blocks": [(r"^stages\.(\d+)\.blocks\.(\d+)", None), (inner, (0,)), (r"^norm", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only each stage's input for the backward pass, and recompute the stage there."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """Return the head; an identity without one."""
        return nn.Identity() if self.head is None else self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head, and the pooling if it is given; only a model built for "token" has a class token."""
        pool = self.global_pool if global_pool is None else global_pool
        _check_pool(pool)
        if pool == "token" and self.config.pool != "class":
            got = f"was built with global_pool={self.global_pool!r} and has no class token, got 'token'"
            raise MixerError(f"MixerPyramid: {got}; build a new model.")
        self.global_pool, weight = pool, self.norm.weight
        self.num_classes, self.config = num_classes, replace(self.config, classes=num_classes)
        self.head = nn.Linear(self.num_features, num_classes).to(weight) if num_classes else None
        if self.head is not None:
            init_linear(self.head, self.config.init_std)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Adapt the model to another image size, as ``Pyramid.resize``."""
        self.resize(img_size)

    def forward_features(self, images: Tensor) -> Tensor:
        """Map images to the normalised last stage: its map (B, D, H / s, W / s), or its tokens with "token"."""
        return self._features(*self._stage_outputs(images)[-1])

    def _features(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        tokens = self.norm(tokens)
        return tokens if self.global_pool == "token" else _map(self.stages[-1], tokens, grid)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map the output of ``forward_features`` to logits, or to the pooled features.

        With ``global_pool=""`` nothing is pooled, and the head maps each place of the map.
        """
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x.mean((2, 3))
        if pre_logits or self.head is None:
            return x
        return self.head(x) if self.global_pool else self.head(x.movedim(1, -1)).movedim(-1, 1)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the maps of some stages, (B, D_i, H / s_i, W / s_i).

        Unless ``intermediates_only``, what ``forward_features`` returns precedes them.

        Args:
            indices: the last n stages, those listed, or all.
            norm, stop_early: no effect: maps have no norm, as PVT feeds them to a feature pyramid, and all stages are
                computed.
        """
        if output_fmt != "NCHW":
            raise MixerError(f"MixerPyramid: the maps of a pyramid are 'NCHW', got output_fmt={output_fmt!r}.")
        taken, _ = feature_take_indices(len(self.stages), indices)
        found = list(zip(self.stages, self._stage_outputs(x), strict=True))
        chosen = [_map(stage, *outputs) for stage, outputs in (found[i] for i in taken)]
        return chosen if intermediates_only else (self._features(*found[-1][1]), chosen)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last one listed, and the head."""
        taken, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()  # type: ignore[assignment]  # as timm does
        if prune_head:
            self.num_classes, self.head = 0, None
        return taken

    def __prepare_scriptable__(self) -> nn.Module:
        """Trace the model for ``torch.jit.script``, for its image size and any number of images."""
        weight, config = self.norm.weight, self.config
        x = torch.randn(2, config.channels, *config.image_size, device=weight.device, dtype=weight.dtype)
        return ScriptedModel(trace_module(self, x))

    def run_stage(self, stage: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Run one stage, recomputed in the backward pass if checkpointing is on."""
        return checkpoint(stage, x, use_reentrant=False) if self.grad_checkpointing and self.training else stage(x)


def _check_pool(name: object) -> None:
    if name not in POOLS:
        raise MixerError(f"MixerPyramid: global_pool={name!r} is unknown; choose 'token', 'avg' or ''.")


def _map(stage: Stage, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the patches of a stage as a map (B, D, H, W), without the class token."""
    return tokens[:, stage.prefix :].transpose(1, 2).unflatten(2, grid)


def _describe(config: PyramidConfig) -> Options:
    return describe_model(config, first_conv="stages.0.patch", pool_size=config.grids()[-1], crop_pct=0.9)


PYRAMID_NAMES: dict[str, str] = {name: name for name, config in MODELS.items() if isinstance(config, PyramidConfig)}
"""timm's name of a pyramid -> its row in ``tokenmix.models.MODELS``."""

default_cfgs = generate_default_cfgs({name: _describe(MODELS[model]) for name, model in PYRAMID_NAMES.items()})


def _register(name: str, model: str) -> None:
    def build(pretrained: bool = False, **kwargs: Any) -> MixerPyramid:
        features = {"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"}
        return build_model_with_cfg(
            MixerPyramid, name, pretrained, feature_cfg=features, config=MODELS[model], **kwargs
        )

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"``tokenmix.models.MODELS[{model!r}]`` for timm."
    globals()[name] = register_model(build)


for _name, _model in PYRAMID_NAMES.items():
    _register(_name, _model)
