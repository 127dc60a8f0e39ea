"""Sums of AFT-conv over a grid of one, two or three axes, in time linear in the number of cells.

Every row sees every key; a key's weight differs from 1 only inside the window around the row. The window is a depthwise
convolution. What lies outside of it is not the whole less the window, which cancels, but a sum of positive parts: the
cells beyond the window along the first axis, then, among those within it there, the ones beyond it along the next.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .softmax import WEIGHT_CAP, Sums, products

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def grid_sums(
    k: Tensor, v: Tensor, kernel: Tensor, grid: tuple[int, ...], prefix: int, *, signed: bool = False
) -> Sums:
    """Compute the sums of all tokens: ``prefix`` ones, whose weight to and from every token is 1, then the cells.

    Args:
        k, v: (B, h, T, 1) and (B, h, T, g, 1), float64.
        kernel: (h, s), (h, s, s) or (h, s, s, s), log-weights, or if ``signed`` what is added to a weight of 1 in the
            numerator alone.
    """
    m, terms = products(k, v)
    first, cells = terms[:, :, :prefix], terms[:, :, prefix:, :, 0].movedim(-1, 1)  # (B, g + 1, h, cells)
    if signed:
        near = _window(cells[:, :-1], kernel.double(), grid)
        total = F.pad(near, (0, 0) * 2 + (0, 1)) + cells.sum(-1, keepdim=True)
    else:
        near = _window(cells, torch.exp(kernel.double().clamp_max(WEIGHT_CAP)), grid)
        lines = cells.flatten(0, 1).unflatten(-1, grid)
        total = near + _sum_outside(lines, 2, kernel.shape[-1]).expand_as(lines).reshape(cells.shape)
    rows = total.movedim(1, -1)[..., None] + first.sum(2, keepdim=True)
    if prefix:
        rows = torch.cat([terms.sum(2, keepdim=True).expand_as(first), rows], 2)
    return Sums(m, torch.zeros_like(m), rows)


def _window(x: Tensor, weights: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Sum x (B, parts, h, cells) over the window around each cell with weights (h, s, ...)."""
    lines = x.flatten(0, 1).unflatten(-1, grid)
    convolve = CONVOLUTIONS[len(grid)]
    near = convolve(lines, weights[:, None], padding=weights.shape[-1] // 2, groups=weights.shape[0])
    return near.reshape(x.shape)


def _sum_outside(x: Tensor, axis: int, size: int) -> Tensor:
    """Sum, for each cell of x (N, h, *grid), the cells outside of the window of ``size`` cells along each axis >= axis.

    Sizes of 1 stand for all cells of an axis, as all see the same sum.
    """
    later = tuple(range(axis + 1, x.ndim))
    lines = x.sum(later, keepdim=True) if later else x
    found = _sum_older_lines(lines, axis, size) + _sum_older_lines(lines.flip(axis), axis, size).flip(axis)
    if later:
        sides = (0, 0) * len(later) + (size // 2, size // 2)
        found = found + _sum_outside(F.pad(x, sides).unfold(axis, size, 1).sum(-1), axis + 1, size)
    return found


def _sum_older_lines(x: Tensor, axis: int, size: int) -> Tensor:
    """Return, for each line along an axis, the sum of the lines before the window around it."""
    n = x.shape[axis]
    return F.pad(x.cumsum(axis).movedim(axis, -1), (size // 2 + 1, 0))[..., :n].movedim(-1, axis)
