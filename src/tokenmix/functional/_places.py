"""Where tokens stand: default positions, rows shifted so that each token lies at its position, and blocks of tokens that share a cell."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor


def before(key_mask: Tensor) -> Tensor:
    """How many keys (B, 1) stand in front of the first True one of each row."""
    return (key_mask.cumsum(1) == 0).sum(1, keepdim=True)


def default_places(rows: int, length: int, key_mask: Tensor | None, device: torch.device) -> Tensor:
    """(B, S): index minus the index of the row's first True key; padding in front gets 0."""
    index = torch.arange(length, device=device).expand(rows, length)
    return index if key_mask is None else (index - before(key_mask)).clamp_min(0)


def shifted(key_mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The mask and each tensor (B, T, ..) with every row moved to the front by its padding there, so that the index is the default position."""
    T = key_mask.shape[1]
    place = torch.arange(T, device=key_mask.device) + before(key_mask)
    live = (place < T) & key_mask.gather(1, place.clamp_max(T - 1))
    return live, *(rows_at(a, place.clamp_max(T - 1)) for a in tensors)


def rows_at(a: Tensor, index: Tensor) -> Tensor:
    """a (B, S, D) at index (B, T): (B, T, D)."""
    return a.gather(1, index[..., None].expand(-1, -1, a.shape[-1]))


def alive(a: Tensor, key_mask: Tensor | None) -> Tensor:
    """a with 0 at masked tokens, whatever stood there."""
    return a if key_mask is None else torch.where(key_mask[..., None], a, 0.0)


def patches(x: Tensor, grid: tuple[int, ...], size: int) -> Tensor:
    """Tokens x (B, prod(grid), D) in cells of ``size`` along each axis, zeros where a cell leaves the grid: (B, cells, size^n, D)."""
    n, (B, _, D) = len(grid), x.shape
    counts = [-(-g // size) for g in grid]
    pad = [p for g, c in zip(reversed(grid), reversed(counts), strict=True) for p in (0, c * size - g)]
    x = F.pad(x.reshape(B, *grid, D), (0, 0, *pad)).reshape(B, *(m for c in counts for m in (c, size)), D)
    order = [0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), 2 * n + 1]
    return x.permute(order).reshape(B, prod(counts), size**n, D)


def strided_conv(cells: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The convolution whose stride is its kernel: cells (B, n, taps, D), weight (D', D, *kernel), bias (D',) -> (B, n, D'), in float64."""
    flat = weight.double().flatten(2).permute(2, 1, 0).flatten(0, 1)
    return cells.double().flatten(2) @ flat + bias.double()


def taps_of(x: Tensor, tap: Tensor, weight: Tensor) -> Tensor:
    """What each token x (B, S, D) adds to its cell: weight (D', D, *kernel) at its tap (B, S) of the flattened kernel -> (B, S, D'), in float64."""
    flat = weight.double().flatten(2).permute(2, 1, 0)
    at = tap[..., None] == torch.arange(len(flat), device=x.device)
    return torch.where(at[..., None], x.double()[:, :, None], 0.0).flatten(2) @ flat.flatten(0, 1)


def gathered(cell: Tensor, live: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Sums over the live tokens of each cell (B, S), at its last token: a bool (B, S) saying which tokens those are, and each sum (B, S, D).

    The last in index, so that a lower-triangular mask hides a cell until all of it has come. O(S^2 D): for positions without structure.
    """
    joint = (cell[:, :, None] == cell[:, None, :]) & live[:, None, :] & live[:, :, None]
    last = live & ~joint.triu(1).any(-1)
    return last, *(joint.to(part.dtype) @ part for part in parts)
