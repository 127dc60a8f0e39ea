"""Pooling as a token mixer (Yu et al. 2022, Eq. 4) as written, token by token."""

from __future__ import annotations

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
    """The mean over the window's tokens that the mask allows, minus the token itself."""
    B, T, _ = x.shape
    mask = torch.ones(B, T, T, dtype=torch.bool) if mask is None else mask
    places = torch.arange(T).expand(B, T) if positions is None else positions
    before, after = (window - 1, 0) if causal_taps else (window // 2, window // 2)
    width = grid[1] if grid else 1
    y = torch.zeros_like(x)
    for b in range(B):
        for t in range(T):
            apart = places[b] - places[b, t]
            if grid:
                lines, columns = places[b] // width - places[b, t] // width, places[b] % width - places[b, t] % width
                apart = torch.where(columns.abs() > lines.abs(), columns, lines)
            pool = mask[b, t] & (apart >= -before) & (apart <= after)
            if pool.any():
                y[b, t] = x[b, pool].mean(0)
            if subtract and mask[b, t, t]:
                y[b, t] = y[b, t] - x[b, t]
    return y
