"""Features by head."""

from __future__ import annotations

from torch import Tensor


def by_head(a: Tensor, heads: int) -> Tensor:
    """(B, T, heads * e) -> (B, heads, T, e), a view."""
    return a.unflatten(-1, (heads, -1)).transpose(1, 2)
