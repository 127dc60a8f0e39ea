"""Pooling as a token mixer (Yu et al. 2022): the mean of a window, minus the token itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact
from .sums.nonfinite import clean, marks, over_pairs
from .sums.taps import centre_of, check_odd, pair_weights, silenced


@exact
def pooling(
    x: Tensor,
    *,
    window: int,
    subtract: bool = True,
    grid: tuple[int, ...] | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = mean of x_s over the valid tokens of the window around t, minus x_t (Yu et al. 2022, Eq. 4).

    Args:
        x: (B, T, D).
        window: tokens with |s - t| <= (window - 1) / 2, window odd; causal: t - window + 1 .. t, any window. On a grid,
            window x window cells.
        subtract: subtract x_t, because the block adds it again.
        grid: (H, W); tokens are its cells row by row.
        positions: (B, T) positions, or flat indices into the grid.

    Returns:
        (B, T, D) in x's dtype; 0 where the window holds no valid token. Time O(T window D), on a grid twice that; with
        positions O(T^2 D).
    """
    choose("pooling", backend, x)
    check_odd("pooling", window, causal)
    if grid is not None and (len(grid) != 2 or causal):
        raise MixerError(f"pooling: expects a grid (H, W) and causal=False, got grid={tuple(grid)}, causal={causal}.")
    v = silenced(x, key_mask)
    valid = torch.ones_like(v[..., :1]) if key_mask is None else key_mask[..., None].to(v.dtype)
    if positions is not None:
        mean = mean_of_pairs(windows(positions, positions, window, grid, causal=causal), v, valid)
    else:
        total = torch.cat([v, valid], -1)
        total = _box(total, window, 1, causal) if grid is None else _box_grid(total, window, grid)
        mean = total[..., :-1] / total[..., -1:].clamp_min(1.0)
    return (mean - v if subtract else mean).to(x.dtype)


def windows(rows: Tensor, cols: Tensor, window: int, grid: tuple[int, ...] | None = None, *, causal: bool) -> Tensor:
    """Return which keys at cols (B, S) lie in the window of queries at rows (B, T).

    (B, T, S) of ones and zeros, float32.
    """
    ones = torch.ones(1, 1, 1, window, dtype=torch.float32, device=rows.device)
    if grid is None:
        return pair_weights(ones, rows, cols, centre_of(window, causal), causal=causal)[:, 0]
    axes = torch.meshgrid(*(torch.arange(n, device=rows.device) for n in grid), indexing="ij")
    near = [
        pair_weights(ones, line.flatten()[rows], line.flatten()[cols], window // 2, causal=False)[:, 0] for line in axes
    ]
    return near[0] * near[1]


def mean_of_pairs(inside: Tensor, v: Tensor, valid: Tensor) -> Tensor:
    """Compute the mean of v (B, S, D) over the valid tokens (B, S, 1) inside."""
    inside = inside.to(v.dtype)
    return (inside @ clean(v)) / (inside @ valid).clamp_min(1.0) + over_pairs(inside != 0, marks(v)).to(v.dtype)


def _box(v: Tensor, window: int, axis: int, causal: bool) -> Tensor:
    """Sum over a window along one axis by shifted additions, where nothing cancels, unlike in running sums."""
    n, centre = v.shape[axis], centre_of(window, causal)
    padded = F.pad(v, (0, 0) * (v.ndim - 1 - axis) + (centre, window - 1 - centre))
    total = padded.narrow(axis, 0, n)
    for j in range(1, window):
        total = total + padded.narrow(axis, j, n)
    return total


def _box_grid(v: Tensor, window: int, grid: tuple[int, ...]) -> Tensor:
    return _box(_box(v.unflatten(1, grid), window, 1, False), window, 2, False).flatten(1, 2)
