"""Log-weights of pairs of tokens from a bias for pairs of positions, as functional forms take them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...functional.attention import ROWS
from ...kernels.backend import exporting
from ...positions import PairPositions


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

    def between(start: int, stop: int) -> Tensor:
        if plain:
            return bias((start, stop), cols.shape[1], dtype, rows.device)
        return bias(rows[:, start:stop], cols, dtype)

    return between(0, rows.shape[1]) if exporting() or rows.shape[1] <= ROWS else between
