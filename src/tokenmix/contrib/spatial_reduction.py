"""Spatial-reduction attention (Wang et al. 2021, "Pyramid Vision Transformer", arXiv:2102.12122, Eqs. 1 to 3).

Keys and values come from cells of R^n tokens. Bidirectional only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..functional.attention import finite_attention
from ..functional.layout.masks import zero_masked
from ..functional.layout.positions import drop_padding
from ..functional.sums.nonfinite import guard_nonfinite
from ..kernels.backend import Backend
from ..kernels.precision import at_least_float32, exact
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least, one_of
from ..mixers.parts.shared import add_projections, largest_dot
from ..mixers.parts.weights_on_call import ReadConv1d, ReadConv2d, ReadConv3d, ReadLayerNorm, child_weights
from .parts.cells import cells_of, patches, strided_conv, sum_cells, taps_of


@exact
@guard_nonfinite("v", asks="q")
def spatial_reduction(
    q: Tensor,
    v: Tensor,
    conv: tuple[Tensor, ...],
    norm: tuple[Tensor, ...],
    k_map: tuple[Tensor, ...],
    v_map: tuple[Tensor, ...],
    *,
    heads: int,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y = attention(q, W_k r + b_k, W_v r + b_v) with r = LayerNorm(conv(v)).

    The convolution has kernel = stride = R along each axis of the grid.

    Args:
        q: (B, T, D).
        v: (B, T, D), the tokens that keys and values are made from.
        conv: (W (D, D, R, ..), b (D,)), one axis of R for each of the grid; empty: no reduction, r = v.
        norm: (gain, shift) of the LayerNorm, eps 1e-5; empty without a reduction.
        k_map, v_map: (W (D, D), b (D,)), or (W,).
        grid: the sizes of the grid of the tokens after the first ``prefix``; prefix tokens are keys as they are. None:
            one axis, positions of the row.
        positions: (B, T) indices into the prefix and the flattened grid if tokens were dropped or moved.

    Sizes that R does not divide are padded with zeros, and masked tokens count as zeros; a cell without a valid token
    is no key. r, keys and values are float64 until the attention. Time O(T D (D + T / R^n)), with explicit positions
    O(T^2 D).
    """
    _check(q, v, conv, norm, heads, grid, prefix)
    if q.shape[1] == 0:
        return torch.zeros_like(q)
    rows, mask = reduce_tokens(v, conv, norm, grid, prefix, positions, key_mask)
    wide = at_least_float32(q)
    keys, values = (F.linear(rows, *(a.double() for a in m)).to(wide.dtype) for m in (k_map, v_map))
    return finite_attention(wide, keys, values, heads=heads, key_mask=mask, backend=backend).to(q.dtype)


@exact
def reduce_tokens(
    v, conv, norm, grid, prefix: int, positions: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the rows r (B, n, D) that keys and values are made from, float64, and which of them may be attended."""
    if not conv:
        return zero_masked(v, key_mask).double(), key_mask
    weight, bias = conv
    if positions is not None:
        return _reduce_positions(v, weight, bias, norm, grid, prefix, positions, key_mask)
    if grid is None and key_mask is not None:
        key_mask, v = drop_padding(key_mask, v)
    v = zero_masked(v, key_mask).double()
    size, grid = weight.shape[-1], (v.shape[1],) if grid is None else grid
    cells = _normal(strided_conv(patches(v[:, prefix:], grid, size), weight, bias), norm)
    rows = torch.cat([v[:, :prefix], cells], 1)
    if key_mask is None:
        return rows, None
    some = patches(key_mask[:, prefix:, None].to(v.dtype), grid, size).amax((-2, -1)) > 0
    return rows, torch.cat([key_mask[:, :prefix], some], 1)


def _reduce_positions(
    v, weight, bias, norm, grid, prefix: int, positions: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return one row per token; the last valid token of each cell, and valid prefix tokens, may be attended."""
    index = positions - prefix
    on_grid = index >= 0
    valid = torch.ones_like(on_grid) if key_mask is None else key_mask
    v = zero_masked(v, valid).double()
    cell, tap = _cells(index.clamp_min(0), grid, weight.shape[-1], weight.ndim - 2)
    last, sums = sum_cells(cell, valid & on_grid, taps_of(v, tap, weight))
    rows = torch.where(on_grid[..., None], _normal(sums + bias.double(), norm), v)
    return rows, torch.where(on_grid, last, valid)


def _cells(index: Tensor, grid: tuple[int, ...] | None, size: int, axes: int) -> tuple[Tensor, Tensor]:
    """Return the cell of each flat index, and its tap there; looked up on grids."""
    if axes == 1 or grid is None:
        return cells_of(index, size)
    lines = torch.meshgrid(*(torch.arange(n, device=index.device) for n in grid), indexing="ij")
    cell, tap = torch.zeros_like(lines[0]), torch.zeros_like(lines[0])
    for line, n in zip(lines, grid, strict=True):
        along, rest = cells_of(line, size)
        cell, tap = cell * (-(-n // size)) + along, tap * size + rest
    return cell.flatten()[index.long()], tap.flatten()[index.long()]


def _normal(rows: Tensor, norm: tuple[Tensor, ...]) -> Tensor:
    gain, shift = (a.double() for a in norm)
    return F.layer_norm(rows, gain.shape, gain, shift)


def _check(
    q: Tensor,
    v: Tensor,
    conv: tuple[Tensor, ...],
    norm: tuple[Tensor, ...],
    heads: int,
    grid: tuple[int, ...] | None,
    prefix: int,
) -> None:
    D = q.shape[-1]
    if D % heads or v.shape != q.shape:
        shapes = f"{tuple(q.shape)} and {tuple(v.shape)}"
        raise MixerError(
            f"spatial_reduction: expects q and v of one shape, with heads={heads} dividing D={D}, got {shapes}."
        )
    if len(conv) not in (0, 2) or len(norm) != len(conv):
        raise MixerError(
            f"spatial_reduction: expects conv and norm of two tensors each, or none, got {len(conv)} and {len(norm)}."
        )
    if conv and conv[0].shape != (D, D, *[conv[0].shape[-1]] * (conv[0].ndim - 2)):
        raise MixerError(
            f"spatial_reduction: expects a weight {(D, D)} with equal kernel sizes, got {tuple(conv[0].shape)}."
        )
    if conv and len(grid or (0,)) != conv[0].ndim - 2:
        raise MixerError(
            f"spatial_reduction: a {conv[0].ndim - 2}-D kernel needs a grid with one size per axis, got grid={grid}."
        )
    if grid is None and prefix:
        raise MixerError(f"spatial_reduction: got prefix={prefix} without a grid; give a grid or prefix=0.")


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

    facts = Facts(
        grid=True,
        about=About("Wang et al. 2021, arXiv 2102.12122", "low rank", "T^2 D / R^n + T D^2", "T D"),
        form=spatial_reduction,
        carries=QKVO,
    )

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

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``spatial_reduction`` for this input: (positional, keyword)."""
        x, grid = inputs.x, inputs.grid
        if grid is None and self.ndim > 1:
            self.refuse(f"was built with ndim={self.ndim} and needs grid=, the {self.ndim} sizes of the token grid")
        if grid is not None and len(grid) != self.ndim:
            self.refuse(f"was built with ndim={self.ndim}, got grid={tuple(grid)}")
        conv, norm = (() if m is None else child_weights(self, m, x) for m in (self.conv, self.norm))
        maps = (child_weights(self, m, x) for m in (self.k_proj, self.v_proj))
        options = {
            "heads": self.heads,
            "grid": grid,
            "prefix": inputs.prefix,
            "positions": inputs.positions,
            "key_mask": inputs.key_mask,
        }
        return (self.q_proj(x), x, conv, norm, *maps), options

    def _cells(self, T: int) -> int:
        return -(-T // self.ratio**self.ndim)

    def mixing_cost(self, T: int) -> MixingCost:
        """Compute the cost for a grid of T tokens that ``ratio`` divides, without prefix, as PVT counts it."""
        D, n, taps = self.dim, self._cells(T), self.ratio**self.ndim
        conv = 2 * n * taps * D * D if self.ratio > 1 else 0
        kept = 4 * 3 * T * D + 8 * (2 * T * D + 5 * n * D + 2 * D * D)
        return MixingCost(
            flops=conv + 4 * T * n * D,
            counted=conv + 4 * T * n * D if 1 in (self.ratio, self.ndim) else None,
            activations=kept,
            projections=4 * D * D * (T + n),
        )

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, v, conv, norm, k_map, _ = args
        with torch.no_grad():
            rows, _ = reduce_tokens(
                v, conv, norm, options["grid"], options["prefix"], options["positions"], options["key_mask"]
            )
            return largest_dot(q.double(), F.linear(rows, *(a.double() for a in k_map)), options["heads"])
