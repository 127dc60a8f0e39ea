"""Softmax attention to and from global tokens, which lie in front."""

from __future__ import annotations

import torch
from torch import Tensor

from ...functional.layout.blocks import (
    PartialSums,
    Ready,
    added_between,
    part_of,
    ratio,
)


def without_first(r: Ready, g: int) -> Tensor | None:
    """Return which keys are valid and not among the first g."""
    if g == 0:
        return r.valid
    later = (torch.arange(r.k.shape[-2], device=r.k.device) >= g)[None, None]
    return later if r.valid is None else r.valid & later


def to_first(r: Ready, g: int, index: Tensor, causal: bool) -> PartialSums:
    """Attend from every row to the first g keys."""
    ok = (index[:g] <= index[:, None]) if causal else (index[:g] >= 0)[None]
    k, v = (a[:, :, :g].contiguous() for a in (r.k, r.v))  # views would keep all keys for backward
    added = added_between(r.added, index[:, None] - index[:g], len(index))
    return part_of(r.q, k, v, ok if r.valid is None else ok & r.valid[:, :, None, :g], added)


def to_all(r: Ready, causal: bool) -> Tensor:
    """Attend from the first rows to all given keys."""
    rows, cols = (torch.arange(a.shape[-2], device=a.device) for a in (r.q, r.k))
    ok = cols <= rows[:, None] if causal else (cols >= 0)[None]
    added = added_between(r.added, rows[:, None] - cols, max(len(rows), len(cols)))
    return ratio(part_of(r.q, r.k, r.v, ok if r.valid is None else ok & r.valid[:, :, None], added))
