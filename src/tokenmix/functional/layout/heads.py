"""Views of features by head."""

from __future__ import annotations

from torch import Tensor


def by_head(a: Tensor, heads: int) -> Tensor:
    """View (B, T, heads * e) as (B, heads, T, e)."""
    return a.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(a: Tensor) -> Tensor:
    """Undo ``by_head``: (B, heads, T, e) -> (B, T, heads * e)."""
    return a.transpose(1, 2).flatten(2)
