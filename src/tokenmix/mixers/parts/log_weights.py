"""Log-weights of pairs of tokens from a bias for pairs of positions, as functional forms take them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...functional.attention import ROWS
from ...functional.sums.nonfinite import clean
from ...kernels.backend import is_exporting
from ...kernels.precision import at_least_float32
from ...positions import ContentPositions, PairPositions


def log_weights(
    bias: PairPositions, rows: Tensor, cols: Tensor, *, plain: bool, dtype: torch.dtype
) -> Tensor | Callable[[int, int], Tensor]:
    """Return w for queries at positions rows (B, T) and keys at cols (B, S): (1 or B, H, T, S).

    For more than ``ROWS`` queries it is a function of the first query and the last plus 1, so that T x S numbers for
    all heads are never held; exported programs hold them.

    Args:
        plain: the positions are the indices.
        dtype: dtype of the logits.
    """
    if not plain and rows.stride(0) == 0 == cols.stride(0):  # the same in all rows
        rows, cols = rows[:1], cols[:1]

    def rows_between(start: int, stop: int) -> Tensor:
        if plain:
            return bias((start, stop), cols.shape[1], dtype, rows.device)
        return bias(rows[:, start:stop], cols, dtype)

    return rows_between(0, rows.shape[1]) if is_exporting() or rows.shape[1] <= ROWS else rows_between


def content_log_weights(
    bias: ContentPositions,
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    cols: Tensor,
    *,
    scale: float | None,
    causal: bool,
    key_mask: Tensor | None,
    attn_mask: Tensor | None = None,
) -> Tensor | Callable[[int, int], Tensor]:
    """Return the same (B, H, T, S) for a bias that reads the queries (B, H, T, e) and the keys (B, G, S, e).

    Numbers that are not finite are read as 0: attention itself hands them on to the rows that attend them.
    """
    (T, S), wide = (q.shape[2], k.shape[2]), at_least_float32(q)
    q = clean(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
    k = clean(k.to(wide.dtype)).repeat_interleave(q.shape[1] // k.shape[1], 1)
    if rows.stride(0) == 0 == cols.stride(0):
        rows, cols = rows[:1], cols[:1]

    def rows_between(start: int, stop: int) -> Tensor:
        seen = torch.ones(1, stop - start, S, dtype=torch.bool, device=q.device)
        seen = seen.tril(start + S - T) if causal else seen
        for mask in (None if key_mask is None else key_mask[:, None], attn_mask):
            if mask is not None:
                seen = seen & (mask if mask.shape[-2] == 1 else mask[..., start:stop, :])
        return bias(q[:, :, start:stop], k, rows[:, start:stop], cols, seen)

    return rows_between(0, T) if is_exporting() or T <= ROWS else rows_between
