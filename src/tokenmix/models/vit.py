"""The Vision Transformer around any mixer (Dosovitskiy et al. 2021, arXiv 2010.11929).

Defaults are those of DeiT (Touvron et al. 2021, arXiv 2012.12877).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..positions.grid import replacing_parameter, resize_rows, sincos
from ..system.config import Json
from ..system.properties import named_errors
from ..types import Options, Spec
from .blocks import Block, cycle_specs
from .images import (
    both_sides,
    check_images,
    check_layers,
    check_multiples,
    held_size,
    image_block,
    normalise_image_config,
    pad_to_patches,
    parts_with_positions,
    refuse_size,
    resize_mixers,
)
from .layers import MLPKind, NormType, build_norm, check_layer_kinds, init_linear
from .model import Model
from .stem import ConvStem, check_stem

POOLS = ("class", "mean")
POSITIONS = ("learned", "sinusoidal", None)


@dataclass(frozen=True)
class ViTConfig(Json):
    """An image classifier as JSON; defaults are DeiT's.

    Args:
        dim: features per token, at least 1.
        layers: number of blocks, at least 1.
        mixers: one spec per layer, or a shorter list repeated cyclically over ``layers``. ``max_len``, ``ndim`` and
            ``grid_size`` are filled in.
        image_size: [height, width] in pixels that the model is built for, multiples of ``patch``.
        patch: side of a patch in pixels, at least 1.
        stem: "patch", one convolution of whole patches; "conv", convolutions of 3 x 3 that halve the sides until a
            place is a patch (``ConvStem``), for which ``patch`` is a power of 2.
        channels: channels of the images, at least 1.
        classes: outputs of the head; 0: no head, the model returns the pooled features.
        mlp_ratio: hidden width of the MLPs as a multiple of ``dim``.
        pool: "class" token, or "mean" over the patches (as for AFT-conv, where only patches may be mixed).
        positions: "learned" vectors, one for the class token and for each patch; "sinusoidal" in two dimensions; or
            None.
        registers: learnable tokens between class token and patches, without positions, dropped at the output (Darcet et
            al. 2024, arXiv 2309.16588); 0: none.
        dropout: dropout rate in [0, 1), of the embedded tokens and each branch.
        drop_path: drop path rate of the last layer, in [0, 1); it rises linearly from 0 in the first layer.
        norm_type: "layer" for LayerNorm, "rms" for RMSNorm.
        mlp: "gelu", "relu2" or "swiglu"; see ``MLP``.
        norm_eps: epsilon of the norms.
        init_std: standard deviation of the initial weights.
    """

    dim: int
    layers: int
    mixers: tuple[Spec, ...]
    image_size: tuple[int, ...] = (224, 224)
    patch: int = 16
    stem: str = "patch"
    channels: int = 3
    classes: int = 1000
    mlp_ratio: float = 4.0
    pool: str = "class"
    positions: str | None = "learned"
    registers: int = 0
    dropout: float = 0.0
    drop_path: float = 0.0
    norm_type: NormType = "layer"
    mlp: MLPKind = "gelu"
    norm_eps: float = 1e-6
    init_std: float = 0.02
    kind: ClassVar[str] = "vit"

    def __post_init__(self) -> None:
        normalise_image_config(self, "dim", "layers", "patch", "channels", not_negative=("classes", "registers"))
        check_layers(self)
        check_layer_kinds("ViTConfig", self.norm_type, self.mlp)
        if self.pool not in POOLS or self.positions not in POSITIONS:
            raise MixerError(
                f"ViTConfig: pool={self.pool!r}, positions={self.positions!r}; "
                + "choose 'class' or 'mean', and 'learned', 'sinusoidal' or null."
            )
        check_stem(type(self).__name__, self.stem, self.patch, self.dim)
        check_multiples(self, self.patch, f"patch={self.patch}")

    @property
    def grid(self) -> tuple[int, int]:
        """Return rows and columns of patches that the model is built for."""
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    @property
    def prefix(self) -> int:
        """Return the number of tokens before the patches: the class token and the registers."""
        return (self.pool == "class") + self.registers

    def specs(self) -> list[Spec]:
        """Return one mixer spec per layer."""
        return cycle_specs(self.mixers, self.layers)


@named_errors
class ViT(Model):
    """Patches, class token and registers, positions, blocks, norm, head.

    Images whose sides are not multiples of the patch are padded with zeros at the right and bottom. A model with
    parameters per position (learned positions, AFT-full, Synthesizers) accepts only the size it was built for, until
    ``resize``; one without accepts any.

    Args:
        config: a ``ViTConfig``.
    """

    config_class = ViTConfig
    pipeline_tags = "image-classification", "image-feature-extraction"

    block_class: ClassVar[type[Block]] = Block
    """Class of the layers; an adapter to another library may need a subclass."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        with torch.random.fork_rng():  # as in LM: only reset_parameters below may draw
            self.patch: nn.Conv2d | ConvStem = (
                ConvStem(config.channels, config.dim, config.patch)
                if config.stem == "conv"
                else nn.Conv2d(config.channels, config.dim, config.patch, stride=config.patch)
            )
            self.class_token = nn.Parameter(torch.empty(config.dim)) if config.pool == "class" else None
            self.registers = nn.Parameter(torch.empty(config.registers, config.dim)) if config.registers else None
            rows = prod(config.grid) + (config.pool == "class")
            self.positions = nn.Parameter(torch.empty(rows, config.dim)) if config.positions == "learned" else None
            sizes: Options = {
                "dim": config.dim,
                "mlp_ratio": config.mlp_ratio,
                "tokens": config.prefix + prod(config.grid),
                "grid": config.grid,
                "mlp": config.mlp,
                "norm_type": config.norm_type,
            }
            self.blocks: Any = nn.ModuleList(
                image_block(config, i, cls=self.block_class, **sizes) for i in range(config.layers)
            )
            self.norm = build_norm(config.norm_type, config.dim, config.norm_eps)
            self.head = nn.Linear(config.dim, config.classes) if config.classes else None
            self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    @property
    def grid(self) -> tuple[int, int]:
        """Return rows and columns of patches that the parameters per position belong to."""
        return self.config.grid

    @property
    def fixed_size(self) -> bool:
        """Return whether anything in the model has parameters per position."""
        return self.positions is not None or any(block.mixer.max_len is not None for block in self.blocks)

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator.

        As in DeiT, weights, the head's included, are drawn from N(0, init_std); biases are 0.
        """
        std = self.config.init_std
        if isinstance(self.patch, ConvStem):
            self.patch.reset_parameters(std)
        else:
            init_linear(self.patch, std)
        for parameter in (self.class_token, self.registers, self.positions):
            if parameter is not None:
                nn.init.normal_(parameter, std=std)
        for block in self.blocks:
            block.reset_parameters(std)
        self.norm.reset_parameters()
        if self.head is not None:
            init_linear(self.head, std)

    def forward(self, images: Tensor, *, keep: Tensor | None = None) -> Tensor:
        """Map images (B, C, H, W) to logits (B, classes)."""
        return self.forward_head(self.forward_features(images, keep=keep))

    def forward_features(self, images: Tensor, *, keep: Tensor | None = None) -> Tensor:
        """Map images (B, C, H, W) to the normalised tokens (B, prefix + patches, D).

        Args:
            keep: (B, K) integers, the patches of each image to use, for masked pretraining and pruning; each keeps its
                position.
        """
        x, given = self.embed(images, keep=keep)
        for block in self.blocks:
            x = block(x, **given)
        return self.norm(x)

    def forward_head(self, tokens: Tensor) -> Tensor:
        """Map normalised tokens to logits (B, classes), or to the pooled features if there is no head."""
        pooled = tokens[:, 0] if self.config.pool == "class" else tokens[:, self.config.prefix :].mean(1)
        return pooled if self.head is None else self.head(pooled)

    def feature_maps(self, images: Tensor, layers: Sequence[int] | None = None) -> list[Tensor]:
        """Return the patches' tokens after some layers (default: four, evenly spaced), each (B, D, rows, columns)."""
        n = len(self.blocks)
        chosen = [max(n * (i + 1) // 4 - 1, 0) for i in range(4)] if layers is None else [range(n)[i] for i in layers]
        x, given = self.embed(images)
        found: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            x = block(x, **given)
            if i in chosen:
                found[i] = x[:, self.config.prefix :].transpose(1, 2).unflatten(2, given["grid"])
        return [found[i] for i in chosen]

    def embed(self, images: Tensor, *, keep: Tensor | None = None) -> tuple[Tensor, Options]:
        """Return the tokens before the first block and the arguments of mixers on grids.

        These are grid, prefix and, with ``keep``, positions.
        """
        check_images("ViT", images, self.config.channels)
        patches = self.patch(pad_to_patches(images, self.config.patch))
        grid = (patches.shape[2], patches.shape[3])
        if grid != self.grid and self.fixed_size:
            parts = parts_with_positions(self.blocks, "learned positions" if self.positions is not None else "")
            refuse_size("ViT", images, self.config.image_size, self.config.patch, parts)
        patches = held_size(patches, "ViT") if self.fixed_size else patches
        x = patches.flatten(2).transpose(1, 2)
        table = self._table(grid, x)
        has_class = self.class_token is not None
        if table is not None:
            x = x + table[has_class:]
        given: Options = {"grid": grid, "prefix": self.config.prefix}
        if keep is not None:
            x, given["positions"] = self._keep_patches(x, keep)
        before = []
        if self.class_token is not None:
            before.append(self.class_token + table[0] if table is not None else self.class_token)
        if self.registers is not None:
            before += list(self.registers)
        if before:
            x = torch.cat([torch.stack(before).to(x.dtype).expand(x.shape[0], -1, -1), x], 1)
        return self.dropout(x), given

    def _table(self, grid: tuple[int, int], x: Tensor) -> Tensor | None:
        """Return the positions of the class token, if there is one, and of the patches."""
        if self.config.positions != "sinusoidal":
            return self.positions
        table = sincos(grid, self.config.dim, device=x.device).to(x.dtype)
        return table if self.class_token is None else torch.cat([torch.zeros_like(table[:1]), table])

    def _keep_patches(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of the patches in ``keep``, and the positions of all tokens."""
        n = x.shape[1]
        if keep.ndim != 2 or keep.shape[0] != x.shape[0] or keep.is_floating_point() or keep.dtype == torch.bool:
            raise MixerError(
                f"ViT: keep must be integers of shape (batch={x.shape[0]}, patches to keep), got {keep.dtype} "
                + f"{tuple(keep.shape)}."
            )
        if not torch.compiler.is_compiling() and keep.numel() and not 0 <= int(keep.min()) <= int(keep.max()) < n:
            raise MixerError(f"ViT: keep must be patches in 0..{n - 1}, got {int(keep.min())} to {int(keep.max())}.")
        prefix = torch.arange(self.config.prefix, device=x.device).expand(x.shape[0], -1)
        return x.gather(1, keep[..., None].expand(-1, -1, x.shape[2])), torch.cat(
            [prefix, self.config.prefix + keep], 1
        )

    def resize(self, image_size: int | Sequence[int]) -> ViT:
        """Adapt this model to another image size in place.

        Learned positions and the pair biases of AFT are interpolated as images.
        """
        new = replace(self.config, image_size=both_sides(image_size, "ViT.resize"))
        old, prefix = self.grid, self.config.prefix
        resize_mixers([(block.mixer, old, new.grid, prefix) for block in self.blocks])
        if self.positions is not None:
            self.positions = replacing_parameter(
                self.positions, resize_rows(self.positions.detach(), old, new.grid, int(self.class_token is not None))
            )
        self.config = new
        return self
