"""Spatial-reduction attention as a layer.

Wang et al. 2021, "Pyramid Vision Transformer", arXiv:2102.12122.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional.spatial_reduction import reduced
from .base import QKVO, About, Arguments, Mixer
from .cost import MixingCost
from .parts.hands_out import ReadConv1d, ReadConv2d, ReadConv3d, ReadLayerNorm
from .parts.options import at_least, one_of
from .parts.shared import add_projections, largest_dot

CONVS = {1: ReadConv1d, 2: ReadConv2d, 3: ReadConv3d}


class SpatialReduction(Mixer):
    """Spatial-reduction attention: y_t = W_o attention(q_t, W_k r, W_v r), r = LayerNorm(conv(x)).

    r has one row for each cell of ``ratio`` tokens along each axis. Wang et al. 2021, arXiv:2102.12122, Eqs. 1 to 3.
    Maps (B, T, D) to (B, T, D). There is no causal form: a cell holds tokens on both sides of most queries near it, and
    the cells of a grid follow no order of time.

    Args:
        ratio: R, kernel and stride of the convolution, 2 by default; 1 is softmax attention. PVT's stages use 8, 4, 2,
            1.
        ndim: 1 (default) for sequences; 2 (images) or 3 for grids whose size is given at call time.
        heads: number of heads, 8 by default; must divide dim.

    Prefix tokens (class, registers) are keys without reduction. Sizes that ``ratio`` does not divide are padded with
    zeros.

    Parameters: q_proj, k_proj, v_proj, out_proj, conv and norm with ratio > 1; with biases, those of PVT. Time O(T^2 D
    / R^ndim + T D^2).

    Raises:
        MixerError: if an option is out of its range, if ``causal=True``, or if the grid does not have ``ndim`` axes.
    """

    supports_grid = True
    about = About("Wang et al. 2021, arXiv 2102.12122", "low rank", "T^2 D / R^n + T D^2", "T D")
    form = "spatial_reduction"
    carries = QKVO

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        ratio: int = 2,
        ndim: int = 1,
        heads: int = 8,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.ratio, self.ndim, self.heads = ratio, ndim, heads
        at_least(self, 1, ratio=ratio)
        one_of(self, tuple(CONVS), ndim=ndim)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias, read=("k_proj", "v_proj"))
        self.conv = CONVS[ndim](dim, dim, ratio, stride=ratio) if ratio > 1 else None
        self.norm = ReadLayerNorm(dim) if ratio > 1 else None

    def functional_args(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Arguments:
        """Return the arguments of ``functional.spatial_reduction`` for this input: (positional, keyword)."""
        if grid is None and self.ndim > 1:
            self.refuse(f"was built with ndim={self.ndim} and needs grid=, the {self.ndim} sizes of the token grid")
        if grid is not None and len(grid) != self.ndim:
            self.refuse(f"was built with ndim={self.ndim}, got grid={tuple(grid)}")
        conv, norm = (() if m is None else self.read(m, x) for m in (self.conv, self.norm))
        maps = (self.read(m, x) for m in (self.k_proj, self.v_proj))
        options = {"heads": self.heads, "grid": grid, "prefix": prefix, "positions": positions, "key_mask": key_mask}
        return (self.q_proj(x), x, conv, norm, *maps), options

    def _cells(self, T: int) -> int:
        return -(-T // self.ratio**self.ndim)

    def projection_flops(self, T):
        return 4 * self.dim**2 * (T + self._cells(T))

    def mixing_cost(self, T: int) -> MixingCost:
        """Compute the cost for a grid of T tokens that ``ratio`` divides, without prefix, as PVT counts it."""
        D, n, taps = self.dim, self._cells(T), self.ratio**self.ndim
        conv = 2 * n * taps * D * D if self.ratio > 1 else 0
        kept = 4 * 3 * T * D + 8 * (2 * T * D + 5 * n * D + 2 * D * D)
        return MixingCost(
            flops=conv + 4 * T * n * D,
            counted=conv + 4 * T * n * D if 1 in (self.ratio, self.ndim) else None,
            activations=kept,
        )

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, v, conv, norm, k_map, _ = args
        with torch.no_grad():
            rows, _ = reduced(
                v, conv, norm, options["grid"], options["prefix"], options["positions"], options["key_mask"]
            )
            return largest_dot(q.double(), F.linear(rows, *(a.double() for a in k_map)), options["heads"])
