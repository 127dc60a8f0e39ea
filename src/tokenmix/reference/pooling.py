"""Pooling as a token mixer (Yu et al. 2022, Eq. 4) as written, token by token."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor


def pooling(
    x: Tensor,
    *,
    window: int,
    subtract: bool = True,
    grid: tuple[int, ...] | None = None,
    positions: Tensor | None = None,
    causal_taps: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the mean over the window's tokens that the mask allows, minus the token itself."""
    B, T, _ = x.shape
    mask = torch.ones(B, T, T, dtype=torch.bool) if mask is None else mask
    positions = torch.arange(T).expand(B, T) if positions is None else positions
    y = torch.zeros_like(x)
    for b, t in product(range(B), range(T)):
        pool = mask[b, t] & _window_mask(positions[b], positions[b, t], window, grid, causal_taps)
        if pool.any():
            y[b, t] = x[b, pool].mean(0)
        if subtract and mask[b, t, t]:
            y[b, t] = y[b, t] - x[b, t]
    return y


def _window_mask(there: Tensor, here: Tensor, window: int, grid: tuple[int, ...] | None, causal_taps: bool) -> Tensor:
    """Return the keys inside the window, along every axis."""
    if causal_taps:
        return (there <= here) & (there > here - window)
    width = grid[1] if grid else 1
    lines, columns = there // width - here // width, there % width - here % width
    return (lines.abs() <= window // 2) & (columns.abs() <= window // 2)
