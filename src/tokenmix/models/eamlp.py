"""EAMLP: External attention (Guo et al. 2021, arXiv 2105.02358) in T2T-ViT (Yuan et al. 2021, arXiv 2101.11986)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..errors import MixerError
from ..positions.grid import resize_rows
from ..system.config import Json
from ..system.properties import named_errors
from ..types import Options, Spec
from .blocks import Block, cycle_specs
from .images import (
    both_sides,
    check_layers,
    check_multiples,
    fit_images,
    image_block,
    normalise_image_config,
    parts_with_positions,
    resize_mixers,
)
from .layers import MLP, init_linear
from .model import Model

SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))
"""Kernel, stride and zero padding of the three soft splits."""
STRIDE = 16


@dataclass(frozen=True)
class EAMLPConfig(Json):
    """An image classifier with the architecture of T2T-ViT as JSON.

    Args:
        dim: width of the layers after the token stages; even, at least 2.
        layers: number of these layers, at least 1.
        mixers: one spec per layer, or a shorter list repeated cyclically over ``layers``; EAMLP uses
            ``external_multihead``, T2T-ViT ``attention``.
        image_size: [height, width] in pixels that the model is built for, multiples of 16.
        channels: channels of the images, at least 1.
        classes: outputs of the head; 0: no head, the model returns the class token's features.
        mlp_ratio: hidden width of the layers' MLPs as a multiple of ``dim``.
        token_mixer: None for EAMLP's token stage, or the spec of another mixer of width ``token_dim``.
        dropout: dropout rate in [0, 1), of the embedded tokens and each branch.
        drop_path: drop path rate of the last layer, in [0, 1); it rises linearly from 0 in the first layer. The token
            stages have none.
    """

    dim: int
    layers: int
    mixers: tuple[Spec, ...]
    image_size: tuple[int, ...] = (224, 224)
    channels: int = 3
    classes: int = 1000
    mlp_ratio: float = 3.0
    token_mixer: Spec | None = None
    dropout: float = 0.0
    drop_path: float = 0.0
    kind: ClassVar[str] = "eamlp"
    token_dim: ClassVar[int] = 64
    token_slots: ClassVar[int] = 128
    norm_eps: ClassVar[float] = 1e-5
    init_std: ClassVar[float] = 0.02

    def __post_init__(self) -> None:
        normalise_image_config(self, "dim", "layers", "channels")
        if self.dim % 2:
            raise MixerError(f"EAMLPConfig: dim must be even (sines and cosines), got {self.dim}.")
        check_layers(self)
        check_multiples(self, STRIDE, str(STRIDE))

    def grids(self) -> list[tuple[int, int]]:
        """Return rows and columns after each soft split; the last are those of the layers."""
        return split_grids(self.image_size)

    def specs(self) -> list[Spec]:
        """Return one mixer spec per layer."""
        return cycle_specs(self.mixers, self.layers)


class TokenMemory(nn.Module):
    """y_t = W_o [Norm(x_t M_k^T) M_v + b]: External attention of a token stage.

    It reads the projected patches as they are. It is the ``external`` mixer without a projection of its own and with a
    bias on the second memory. Both memories start equal and are trained separately, as in the official code once its
    model has been moved to a device.
    """

    def __init__(self, dim: int, slots: int):
        super().__init__()
        self.memory_k, self.memory_v = (nn.Parameter(torch.empty(slots, dim)) for _ in range(2))
        self.memory_v_bias = nn.Parameter(torch.empty(dim))
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        return self.out_proj(functional.external(x, self.memory_k, self.memory_v, None, self.memory_v_bias))

    def reset_parameters(self, std: float) -> None:
        """Draw M_k = M_v from N(0, std); set biases to 0."""
        nn.init.normal_(self.memory_k, std=std)
        with torch.no_grad():
            self.memory_v.copy_(self.memory_k)
        nn.init.zeros_(self.memory_v_bias)
        init_linear(self.out_proj, std)


class MemoryBlock(nn.Module):
    """x + memory(x), then x + mlp(norm(x)), where the MLP is no wider than x."""

    def __init__(self, dim: int, slots: int, *, norm_eps: float, dropout: float):
        super().__init__()
        self.memory = TokenMemory(dim, slots)
        self.mlp_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = MLP(dim, 1.0)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, **given: object) -> Tensor:
        """Map (B, T, D) to (B, T, D); the positions of tokens do not matter here."""
        x = x + self.dropout(self.memory(x))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def reset_parameters(self, std: float) -> None:
        """Re-initialise all parameters as in ``Block``."""
        self.memory.reset_parameters(std)
        self.mlp_norm.reset_parameters()
        self.mlp.reset_parameters(std, std)


class TokenStage(nn.Module):
    """Soft split, norm, projection to ``token_dim``, one block; the output tokens form a map again."""

    def __init__(self, config: EAMLPConfig, index: int):
        super().__init__()
        self.split = SPLITS[index]
        width, dim, grid = (
            (config.token_dim if index else config.channels) * self.split[0] ** 2,
            config.token_dim,
            config.grids()[index],
        )
        options: Options = {"norm_eps": config.norm_eps, "dropout": config.dropout}
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.project = nn.Linear(width, dim)
        self.block: MemoryBlock | Block = MemoryBlock(dim, config.token_slots, **options)
        if config.token_mixer is not None:
            self.block = Block(
                dim, config.token_mixer, causal=False, max_len=prod(grid), grid=grid, mlp_ratio=1.0, **options
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, token_dim, H / stride, W / stride)."""
        x, grid = soft_split(x, *self.split)
        x = self.block(self.project(self.norm(x)), grid=grid, prefix=0)
        return x.transpose(1, 2).unflatten(2, grid)

    def reset_parameters(self, std: float) -> None:
        """Re-initialise norms; draw weights from N(0, std) and set biases to 0."""
        self.norm.reset_parameters()
        init_linear(self.project, std)
        self.block.reset_parameters(std)


@named_errors
class EAMLP(Model):
    """Two token stages, a third soft split, class token, fixed positions, blocks, norm, head.

    Images whose sides are not multiples of 16 are padded with zeros at the right and bottom. Positions are the
    one-dimensional sinusoids of Vaswani et al. 2017 over the class token and the patches in raster order. Their table
    is not trained and belongs to one image size, until ``resize``.

    Args:
        config: an ``EAMLPConfig``.
    """

    config_class = EAMLPConfig
    pipeline_tags = "image-classification", "image-feature-extraction"

    positions: Tensor

    def __init__(self, config: EAMLPConfig):
        super().__init__()
        self.config = config
        with torch.random.fork_rng():  # as in ViT: only reset_parameters below may draw
            self.token_stages: Any = nn.ModuleList(TokenStage(config, i) for i in range(2))
            self.project = nn.Linear(config.token_dim * SPLITS[2][0] ** 2, config.dim)
            self.class_token = nn.Parameter(torch.empty(config.dim))
            self.register_buffer("positions", torch.empty(1 + prod(self.grid), config.dim))
            sizes: Options = {
                "dim": config.dim,
                "mlp_ratio": config.mlp_ratio,
                "tokens": 1 + prod(self.grid),
                "grid": self.grid,
            }
            self.blocks: Any = nn.ModuleList(image_block(config, i, **sizes) for i in range(config.layers))
            self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
            self.head = nn.Linear(config.dim, config.classes) if config.classes else None
            self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    @property
    def grid(self) -> tuple[int, int]:
        """Return rows and columns of the tokens that the layers mix."""
        return self.config.grids()[-1]

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator.

        Weights are drawn from N(0, init_std), biases are 0, and the fixed positions are computed again.
        """
        std = self.config.init_std
        for stage in self.token_stages:
            stage.reset_parameters(std)
        init_linear(self.project, std)
        nn.init.normal_(self.class_token, std=std)
        with torch.no_grad():
            self.positions.copy_(sinusoids(*self.positions.shape))
        for block in self.blocks:
            block.reset_parameters(std)
        self.norm.reset_parameters()
        if self.head is not None:
            init_linear(self.head, std)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, classes)."""
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to the normalised tokens (B, 1 + patches, D), the class token first."""
        c, blocks = self.config, [*self.blocks, *(s.block for s in self.token_stages if isinstance(s.block, Block))]
        parts = parts_with_positions(blocks, "fixed positions")
        x = fit_images("EAMLP", images, channels=c.channels, patch=STRIDE, built=c.image_size, parts=parts)
        for stage in self.token_stages:
            x = stage(x)
        x, grid = soft_split(x, *SPLITS[2])
        x = self.project(x)
        x = torch.cat([self.class_token.to(x.dtype).expand(x.shape[0], 1, -1), x], 1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = block(x, grid=grid, prefix=1)
        return self.norm(x)

    def forward_head(self, tokens: Tensor) -> Tensor:
        """Map normalised tokens to logits (B, classes), or to the class token's features if there is no head."""
        return tokens[:, 0] if self.head is None else self.head(tokens[:, 0])

    def resize(self, image_size: int | Sequence[int]) -> EAMLP:
        """Adapt this model to another image size in place.

        The table of positions and the pair biases of AFT are interpolated as images. A model built for the new size has
        the sinusoids of its own raster instead; those would give the trained layers other neighbours.
        """
        new = replace(self.config, image_size=both_sides(image_size, "EAMLP.resize"))
        *before, (old, to) = zip(self.config.grids(), new.grids(), strict=True)
        steps = [(block.mixer, old, to, 1) for block in self.blocks]
        for stage, grids in zip(self.token_stages, before, strict=True):
            steps += [(stage.block.mixer, *grids, 0)] if isinstance(stage.block, Block) else []
        resize_mixers(steps)
        self.positions = resize_rows(self.positions, old, to, 1)
        self.config = new
        return self


def soft_split(x: Tensor, kernel: int, stride: int, padding: int) -> tuple[Tensor, tuple[int, int]]:
    """Cut overlapping patches from a map (B, C, H, W).

    Returns tokens (B, rows * columns, C kernel^2), and (rows, columns).
    """
    tokens = F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)
    down, right = ((n + 2 * padding - kernel) // stride + 1 for n in x.shape[2:])
    return tokens, (down, right)


def split_grids(image_size: Sequence[int]) -> list[tuple[int, int]]:
    """Return rows and columns after each soft split of an image whose sides are multiples of 16."""
    return [(image_size[0] // s, image_size[1] // s) for s in (4, 8, 16)]


def sinusoids(length: int, dim: int) -> Tensor:
    """Compute the table (length, dim) of positions.

    It is sin(t / 10000^(2 i / dim)) at feature 2 i and the cosine at 2 i + 1 (Vaswani et al. 2017, Sec. 3.5).
    """
    rate = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rate
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1).float()
