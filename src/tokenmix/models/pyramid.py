"""The Pyramid Vision Transformer around any mixer (Wang et al. 2021, arXiv 2102.12122).

Its stages have decreasing resolution; it is a backbone for dense tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..positions.grid import replacing_parameter, resize_rows
from ..system.config import Json
from ..system.properties import named_errors
from ..types import Options, Spec
from .blocks import Block, cycle_specs
from .images import (
    both_sides,
    check_multiples,
    fit_images,
    image_block,
    normalise_image_config,
    parts_with_positions,
    resize_mixers,
)
from .layers import init_linear
from .model import Model
from .vit import POOLS

POSITIONS = ("learned", None)
PER_STAGE = ("depths", "dims", "patches", "mlp_ratios")


@dataclass(frozen=True)
class PyramidConfig(Json):
    """A pyramid of stages as JSON. Lists hold one entry per stage; the defaults are PVT's four stages (Table 1).

    Args:
        depths: layers of each stage, at least 1.
        mixers: one spec per stage, one per layer, or a single one for all. ``max_len``, ``ndim`` and ``grid_size`` are
            filled in for each stage.
        dims: width of each stage, at least 1.
        patches: side of the square of pixels, then of tokens of the previous stage, that becomes one token; at least 1.
        mlp_ratios: hidden width of each stage's MLPs as a multiple of its width, above 0.
        image_size: [height, width] in pixels that the model is built for, multiples of the product of ``patches``.
        channels: channels of the images, at least 1.
        classes: outputs of the head; 0: no head, the model returns the pooled features.
        pool: "class", a class token in the last stage, as PVT classifies; or "mean" over the last stage's tokens,
            without a class token, as PVT is used in dense tasks.
        positions: "learned" vectors in every stage, or None.
        dropout: dropout rate in [0, 1), of the embedded tokens and each branch.
        drop_path: drop path rate of the last layer of the last stage, in [0, 1); it rises linearly from 0 in the first
            layer.
    """

    depths: tuple[int, ...]
    mixers: tuple[Spec, ...]
    dims: tuple[int, ...] = (64, 128, 320, 512)
    patches: tuple[int, ...] = (4, 2, 2, 2)
    mlp_ratios: tuple[float, ...] = (8.0, 8.0, 4.0, 4.0)
    image_size: tuple[int, ...] = (224, 224)
    channels: int = 3
    classes: int = 1000
    pool: str = "class"
    positions: str | None = "learned"
    dropout: float = 0.0
    drop_path: float = 0.0
    kind: ClassVar[str] = "pyramid"
    norm_eps: ClassVar[float] = 1e-6
    init_std: ClassVar[float] = 0.02

    def __post_init__(self) -> None:
        normalise_image_config(self, "channels")
        for name in PER_STAGE:
            self._check_stages(name)
        if len(self.mixers) not in (1, len(self.depths), self.layers):
            wanted = f"one spec, one for each of {len(self.depths)} stages or one for each of {self.layers} layers"
            raise MixerError(f"PyramidConfig: mixers must hold {wanted}, got {len(self.mixers)}.")
        if self.pool not in POOLS or self.positions not in POSITIONS:
            raise MixerError(
                f"PyramidConfig: pool={self.pool!r}, positions={self.positions!r}; "
                + "choose 'class' or 'mean', and 'learned' or null."
            )
        check_multiples(self, self.stride, f"{self.stride}, the product of patches")

    def _check_stages(self, name: str) -> None:
        values = tuple(getattr(self, name))
        object.__setattr__(self, name, values)
        if len(values) != len(self.depths) or not values:
            raise MixerError(
                f"PyramidConfig: depths has {len(self.depths)} stages, but {name} has {len(values)}: {list(values)}."
            )
        kinds = (int, float) if name == "mlp_ratios" else int
        if not all(isinstance(n, kinds) and n > 0 for n in values):
            raise MixerError(
                f"PyramidConfig: {name} must be positive {'numbers' if name == 'mlp_ratios' else 'integers'}, got "
                + f"{list(values)}."
            )

    @property
    def layers(self) -> int:
        """Return the number of layers of all stages."""
        return sum(self.depths)

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the side of one token in pixels, stage by stage: 4, 8, 16, 32."""
        return tuple(accumulate(self.patches, mul))

    @property
    def stride(self) -> int:
        """Return the side in pixels of one token of the last stage."""
        return prod(self.patches)

    def grids(self) -> list[tuple[int, int]]:
        """Return rows and columns of tokens of each stage."""
        return [(self.image_size[0] // s, self.image_size[1] // s) for s in self.strides]

    def specs(self) -> list[Spec]:
        """Return one mixer spec per layer."""
        if len(self.mixers) == len(self.depths):
            return [spec for spec, depth in zip(self.mixers, self.depths, strict=True) for _ in range(depth)]
        return cycle_specs(self.mixers, self.layers)


class Stage(nn.Module):
    """Patches of the previous map, LayerNorm, positions, blocks.

    Args:
        config: config of the pyramid.
        index: number of the stage, from 0.
    """

    block_class: ClassVar[type[Block]] = Block

    def __init__(self, config: PyramidConfig, index: int):
        super().__init__()
        dim, patch, grid = config.dims[index], config.patches[index], config.grids()[index]
        self.prefix = int(index == len(config.dims) - 1 and config.pool == "class")
        self.patch = nn.Conv2d(config.dims[index - 1] if index else config.channels, dim, patch, stride=patch)
        self.patch_norm = nn.LayerNorm(dim)
        self.class_token = nn.Parameter(torch.empty(dim)) if self.prefix else None
        rows = self.prefix + prod(grid)
        self.positions = nn.Parameter(torch.empty(rows, dim)) if config.positions == "learned" else None
        first = sum(config.depths[:index])
        sizes: Options = {"dim": dim, "mlp_ratio": config.mlp_ratios[index], "tokens": rows, "grid": grid}
        layers = range(first, first + config.depths[index])
        self.blocks: Any = nn.ModuleList(image_block(config, i, cls=self.block_class, **sizes) for i in layers)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Map (B, C, H, W) to tokens (B, prefix + rows * columns, D) and their (rows, columns)."""
        patches = self.patch(x)
        grid = (patches.shape[2], patches.shape[3])
        x = self.patch_norm(patches.flatten(2).transpose(1, 2))
        if self.class_token is not None:
            x = torch.cat([self.class_token.to(x.dtype).expand(x.shape[0], 1, -1), x], 1)
        if self.positions is not None:
            x = x + self.positions
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, grid=grid, prefix=self.prefix)
        return x, grid

    def reset_parameters(self, std: float) -> None:
        """Draw weights, positions and class token from N(0, std); set biases to 0."""
        init_linear(self.patch, std)
        self.patch_norm.reset_parameters()
        for parameter in (self.class_token, self.positions):
            if parameter is not None:
                nn.init.normal_(parameter, std=std)
        for block in self.blocks:
            block.reset_parameters(std)

    def resize_positions(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        """Interpolate the learned positions from one grid to another."""
        if self.positions is not None:
            self.positions = replacing_parameter(
                self.positions, resize_rows(self.positions.detach(), old, new, self.prefix)
            )


@named_errors
class Pyramid(Model):
    """Stages of tokens on ever coarser grids, norm, head.

    Images whose sides are not multiples of the last stage's stride are padded with zeros at the right and bottom (PVT
    drops the remainder). A model with parameters per position accepts only the size it was built for, until ``resize``;
    one without accepts any.

    Args:
        config: a ``PyramidConfig``.
    """

    config_class = PyramidConfig
    stage_class: ClassVar[type[Stage]] = Stage
    pipeline_tags = "image-classification", "image-feature-extraction"

    def __init__(self, config: PyramidConfig):
        super().__init__()
        self.config = config
        with torch.random.fork_rng():  # as in ViT: only reset_parameters below may draw
            self.stages: Any = nn.ModuleList(self.stage_class(config, i) for i in range(len(config.dims)))
            self.norm = nn.LayerNorm(config.dims[-1], eps=config.norm_eps)
            self.head = nn.Linear(config.dims[-1], config.classes) if config.classes else None
        self.reset_parameters()

    @property
    def blocks(self) -> list[Block]:
        """Return the layers of all stages."""
        return [block for stage in self.stages for block in stage.blocks]

    @property
    def fixed_size(self) -> bool:
        """Return whether anything in the model has parameters per position."""
        return bool(self._bound())

    def _bound(self) -> list[str]:
        return parts_with_positions(self.blocks, "learned positions" if self.config.positions else "")

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator.

        Weights, the head's included, are drawn from N(0, init_std); biases are 0.
        """
        for stage in self.stages:
            stage.reset_parameters(self.config.init_std)
        self.norm.reset_parameters()
        if self.head is not None:
            init_linear(self.head, self.config.init_std)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, classes)."""
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to the normalised tokens of the last stage (B, prefix + patches, D)."""
        return self.norm(self._stage_outputs(images)[-1][0])

    def forward_head(self, tokens: Tensor) -> Tensor:
        """Map normalised tokens to logits (B, classes), or to the pooled features if there is no head."""
        pooled = tokens[:, 0] if self.config.pool == "class" else tokens.mean(1)
        return pooled if self.head is None else self.head(pooled)

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """Compute the map of each stage, finest first: (B, D_i, H / s_i, W / s_i).

        The strides s are 4, 8, 16, 32; H and W are those of the padded image. The maps include neither norm nor class
        token, as PVT feeds a feature pyramid; with ``pool="class"`` the last stage was mixed with its class token.
        """
        found = zip(self.stages, self._stage_outputs(images), strict=True)
        return [tokens[:, stage.prefix :].transpose(1, 2).unflatten(2, grid) for stage, (tokens, grid) in found]

    def _stage_outputs(self, images: Tensor) -> list[tuple[Tensor, tuple[int, int]]]:
        """Compute tokens and grid of every stage."""
        c = self.config
        x = fit_images("Pyramid", images, channels=c.channels, patch=c.stride, built=c.image_size, parts=self._bound())
        found = []
        for stage in self.stages:
            tokens, grid = self.run_stage(stage, x)
            found.append((tokens, grid))
            x = tokens[:, stage.prefix :].transpose(1, 2).unflatten(2, grid)
        return found

    def run_stage(self, stage: Stage, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Run one stage; a subclass may run it with less memory."""
        return stage(x)

    def resize(self, image_size: int | Sequence[int]) -> Pyramid:
        """Adapt this model to another image size in place.

        Learned positions and the pair biases of AFT are interpolated as images.
        """
        new = replace(self.config, image_size=both_sides(image_size, "Pyramid.resize"))
        grids = list(zip(self.stages, self.config.grids(), new.grids(), strict=True))
        resize_mixers([(block.mixer, old, to, stage.prefix) for stage, old, to in grids for block in stage.blocks])
        for stage, old, to in grids:
            stage.resize_positions(old, to)
        self.config = new
        return self
