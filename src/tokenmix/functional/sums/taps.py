"""Sums over a window of taps: tap j weighs the key ``j - centre`` positions after the query; nothing else is attended.

Where every token stands at its index, the window slides over the values; elsewhere the taps are laid out as one weight
per pair. Shapes: values v (B, S, G, c) with G = 1 (shared) or H; taps (B or 1, T or 1, H, s); results (B, T, H, c).
"""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ...kernels.precision import at_least_float32, cast_alike, exact
from ..layout.masks import zero_masked
from .nonfinite import clean, marks, over_pairs


def centre_of(size: int, causal: bool) -> int:
    """Return the tap at the query's own position: the last one in a causal window, else the middle one."""
    return size - 1 if causal else size // 2


def zero_masked_values(v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return v (B, S, D) in float32 or better, with 0 at masked tokens, whatever they held."""
    return zero_masked(at_least_float32(v), key_mask)


def slide(taps: Tensor, v: Tensor, centre: int) -> Tensor:
    """Compute sum_j taps_j v_{t + j - centre} by index: s shifted products, no (T, s, D) tensor. Time O(T s D)."""
    T, size = v.shape[1], taps.shape[-1]
    padded = F.pad(v, (0, 0, 0, 0, centre, size - 1 - centre))
    total = taps[..., 0, None] * padded[:, :T]
    for j in range(1, size):
        total = total + taps[..., j, None] * padded[:, j : j + T]
    return total


def depthwise(taps: Tensor, v: Tensor, centre: int) -> Tensor:
    """Apply ``slide`` for taps (H, s) that are the same at every token.

    One depthwise convolution over v (B, T, D), D a multiple of H.
    """
    D, size = v.shape[-1], taps.shape[-1]
    if v.shape[1] == 0:
        return v
    weight = taps.repeat_interleave(D // taps.shape[0], 0)[:, None]
    return F.conv1d(F.pad(v.transpose(1, 2), (centre, size - 1 - centre)), weight, groups=D).transpose(1, 2)


def pair_weights(taps: Tensor, rows: Tensor, cols: Tensor, centre: int, *, causal: bool) -> Tensor:
    """Lay out weights (B, H, T, S) of keys at positions cols (B, S) for queries at rows (B, T); 0 where no tap falls.

    ``causal``: the last T keys are the queries themselves, and a query sees no key after its own index, whatever the
    positions.
    """
    T, S = rows.shape[1], cols.shape[1]
    tap = cols[:, None] - rows[:, :, None] + centre
    near = (tap >= 0) & (tap < taps.shape[-1])
    if causal:
        near = near & torch.ones(T, S, dtype=torch.bool, device=rows.device).tril(S - T)
    return _laid_out(taps, tap, near)


def grid_weights(taps: Tensor, positions: Tensor, grid: tuple[int, ...], prefix: int, sizes: tuple[int, int]) -> Tensor:
    """Lay out ``pair_weights`` on a grid.

    Tap i * b + j of sizes (a, b) weighs the cell i - a // 2 lines and j - b // 2 columns away. positions (B, T) are
    flat indices after ``prefix`` tokens outside the grid, which have weight 0 to and from all.
    """
    # written out, because inductor fails on indices computed with // and %
    cells = torch.tensor(list(product(*map(range, grid))), device=positions.device)
    on_grid = positions >= prefix
    near, tap = on_grid[:, :, None] & on_grid[:, None], torch.zeros_like(positions)[:, :, None]
    for axis, size in zip(cells.unbind(-1), sizes, strict=True):
        line = axis[(positions - prefix).clamp_min(0)]
        step = line[:, None] - line[:, :, None] + size // 2
        near, tap = near & (step >= 0) & (step < size), tap * size + step
    return _laid_out(taps, tap, near)


def _laid_out(taps: Tensor, tap: Tensor, near: Tensor) -> Tensor:
    """Return (B, H, T, S): of each query's taps (B or 1, T or 1, H, s), number ``tap`` (B, T, S), where ``near``."""
    (B, T, S), H, size = tap.shape, taps.shape[2], taps.shape[-1]
    spread = taps.transpose(1, 2).expand(B, H, T, size)
    return torch.where(near[:, None], spread.gather(-1, tap.clamp(0, size - 1)[:, None].expand(B, H, T, S)), 0.0)


@exact
def weigh_values(weights: Tensor, v: Tensor) -> Tensor:
    """Compute sum_s weights_ts v_s: (B, H, T, S) and (B, S, G, c) -> (B, T, H, c)."""
    met = over_pairs((weights != 0).any(1), marks(v.flatten(2)))[:, :, None]
    weights, v = cast_alike(weights, clean(v))
    return (weights @ v.transpose(1, 2)).transpose(1, 2) + met.to(v.dtype)


def check_odd(who: str, size: int, causal: bool) -> None:
    """Refuse a two-sided window with an even number of taps, which has no middle tap."""
    if size < 1 or (not causal and size % 2 == 0):
        raise MixerError(
            f"{who}: a two-sided window needs an odd number of taps, got {size}; causal=True takes any number."
        )
