"""Cells of tokens that share one key: where they lie, and convolutions whose stride is their kernel."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ...functional.sums.nonfinite import clean, marks, over_pairs
from ...kernels.precision import exact


def patches(x: Tensor, grid: tuple[int, ...], size: int) -> Tensor:
    """Arrange tokens x (B, prod(grid), D) in cells of ``size`` along each axis: (B, cells, size^n, D).

    Cells that extend beyond the grid are filled with zeros.
    """
    n, (B, _, D) = len(grid), x.shape
    counts = [-(-g // size) for g in grid]
    pad = [p for g, c in zip(reversed(grid), reversed(counts), strict=True) for p in (0, c * size - g)]
    x = F.pad(x.reshape(B, *grid, D), (0, 0, *pad)).reshape(B, *(m for c in counts for m in (c, size)), D)
    order = [0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), 2 * n + 1]
    return x.permute(order).reshape(B, prod(counts), size**n, D)


def strided_conv(cells: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply the convolution whose stride is its kernel, in float64.

    cells (B, n, taps, D), weight (D', D, *kernel), bias (D',) -> (B, n, D').
    """
    flat = weight.double().flatten(2).permute(2, 1, 0).flatten(0, 1)
    return cells.double().flatten(2) @ flat + bias.double()


def taps_of(x: Tensor, tap: Tensor, weight: Tensor) -> Tensor:
    """Compute the contribution of each token x (B, S, D) to its cell, in float64.

    weight (D', D, *kernel) at the token's tap (B, S) of the flattened kernel -> (B, S, D').
    """
    flat = weight.double().flatten(2).permute(2, 1, 0)
    at = tap[..., None] == torch.arange(len(flat), device=x.device)
    return torch.where(at[..., None], x.double()[:, :, None], 0.0).flatten(2) @ flat.flatten(0, 1)


def sum_cells(cell: Tensor, valid: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Sum over the valid tokens of each cell (B, S), at the cell's last token.

    Returns a bool (B, S) marking those last tokens, and each sum (B, S, D). The last token by index is used so that a
    lower-triangular mask hides a cell until all of it has come. O(S^2 D): for positions without structure.
    """
    joint = (cell[:, :, None] == cell[:, None, :]) & valid[:, None, :] & valid[:, :, None]
    last = valid & ~joint.triu(1).any(-1)
    return last, *(joint.to(part.dtype) @ clean(part) + over_pairs(joint, marks(part)).to(part.dtype) for part in parts)


@exact
def cells_of(positions: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the block of each position, and its offset there."""
    cell = torch.div(positions, block, rounding_mode="floor")
    return cell, positions - cell * block
