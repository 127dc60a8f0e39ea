"""Sums over causal, banded and full patterns of visible keys, put together from the pieces of ``_sums``.

``reach`` = (low, high): the source's weights are zero unless low <= s - t <= high; ``None``: no such limit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._sums import LEAF, LEAF_JUMP, NEG, Sums, blocked, delay, flip, literal, merge, over_all, over_leaf, over_visible, scan
from ._weights import Weights

Reach = tuple[int, int]


def causal_sums(k: Tensor, v: Tensor, source: Weights, live: Tensor | None, *, reach: Reach | None = None) -> Sums:
    """Row t sees keys 0..t. Blocks are as long as the window, so that only the previous block and the running sum of all before it remain."""
    T = k.shape[-2]
    size = LEAF
    while size < T and (reach is None or size < -reach[0]):
        size *= 2
    kb, vb, lb = blocked(k, v, live, LEAF)
    total = over_leaf(kb, vb, source.blocks(LEAF, 0), lb, jump=LEAF_JUMP)
    total = Sums(*(a.flatten(-3, -2)[..., :T, :] for a in total))
    span = LEAF
    while span < min(size, T):
        total = _add_halves(total, k, v, source, live, span)
        span *= 2
    return total if size >= T else _add_blocks(total, k, v, source, live, size)


def _add_halves(total: Sums, k: Tensor, v: Tensor, source: Weights, live: Tensor | None, span: int) -> Sums:
    """In every stretch of 2 span tokens let the second half see the first half."""
    T, stretch = k.shape[-2], 2 * span
    whole = T // stretch * stretch
    middle = min(whole + span, T)
    pieces = []
    if whole:
        kf, vf, lf = (a if a is None else a[..., :whole, :].unflatten(-2, (-1, stretch))[..., :span, :] for a in (k, v, live))
        part = over_visible(kf, vf, source.blocks(stretch, 0)[..., : whole // stretch, span:, :span], lf)
        rows = Sums(*(a[..., :whole, :].unflatten(-2, (-1, 2, span)) for a in total))
        later = merge(Sums(*(a[..., 1, :, :] for a in rows)), part)
        pieces.append(Sums(*(torch.stack([a[..., 0, :, :], b], -3).flatten(-4, -2) for a, b in zip(rows, later, strict=True))))
    if whole < T:
        pieces.append(Sums(*(a[..., whole:middle, :] for a in total)))
    if middle < T:
        kf, vf, lf = (a if a is None else a[..., whole:middle, :] for a in (k, v, live))
        part = over_visible(kf, vf, source.slab(slice(middle, T), slice(whole, middle)), lf)
        pieces.append(merge(Sums(*(a[..., middle:, :] for a in total)), part))
    return Sums(*(torch.cat(parts, -2) for parts in zip(*pieces, strict=True)))


def _add_blocks(total: Sums, k: Tensor, v: Tensor, source: Weights, live: Tensor | None, size: int) -> Sums:
    """Let every block see the block before it under its weights, and all earlier blocks under weight 0."""
    T = k.shape[-2]
    kb, vb, lb = blocked(k, v, live, size)
    kp, vp, lp = (a if a is None else a[..., :-1, :, :] for a in (kb, vb, lb))
    near = over_visible(kp, vp, source.blocks(size, 1), lp)
    near = delay(Sums(*(F.pad(a, (0, 0, 0, 0, 0, 1)) for a in near)), 1)
    far = delay(scan(over_all(kb, vb, lb)), 2)
    rows = Sums(*(F.pad(a, (0, 0, 0, -T % size)).unflatten(-2, (-1, size)) for a in total))
    rows = merge(merge(rows, near), far)
    return Sums(*(a.flatten(-3, -2)[..., :T, :] for a in rows))


def band_sums(k: Tensor, v: Tensor, source: Weights, live: Tensor | None, *, reach: Reach) -> Sums:
    """Every row sees every key; weights are non-zero inside the reach only. Blocks see themselves, their neighbours, and the sums of the rest."""
    T = k.shape[-2]
    size = _block_size(reach)
    kb, vb, lb = blocked(k, v, torch.ones_like(k[..., :1]) if live is None else live, size)
    assert lb is not None
    w = torch.cat([_aligned(source, size, o, kb.shape[-3]) for o in (1, 0, -1)], -1)
    rows = over_visible(_neighbours(kb, NEG), _neighbours(vb, 0.0), w, _neighbours(lb, 0.0))
    sums = over_all(kb, vb, lb)
    rows = merge(merge(rows, delay(scan(sums), 2)), flip(delay(scan(flip(sums)), 2)))
    return Sums(*(a.flatten(-3, -2)[..., :T, :] for a in rows))


def window_ratio(k: Tensor, v: Tensor, source: Weights, live: Tensor | None, *, reach: Reach) -> Tensor:
    """Row t sees only the keys inside the reach: num / den, each row under its own maximum, for a far key may be any amount larger."""
    T = k.shape[-2]
    size = _block_size(reach)
    kb, vb, lb = blocked(k, v, torch.ones_like(k[..., :1]) if live is None else live, size)
    assert lb is not None
    w = torch.cat([_aligned(source, size, o, kb.shape[-3]) for o in (1, 0, -1)], -1)
    i = torch.arange(size, device=k.device)
    distance = torch.cat([i - size, i, i + size]) - i[:, None]
    inside = (distance >= reach[0]) & (distance <= reach[1]) & (_neighbours(lb, 0.0) > 0).transpose(-1, -2)
    return literal(_neighbours(kb, NEG), _neighbours(vb, 0.0), w, inside).flatten(-3, -2)[..., :T, :]


def _block_size(reach: Reach) -> int:
    size = LEAF
    while size < max(-reach[0], reach[1]):
        size *= 2
    return size


def _neighbours(a: Tensor, beyond: float) -> Tensor:
    """Blocks i-1, i, i+1 side by side: (..., n, 3 size, c), filled with ``beyond`` outside of the sequence."""
    before = F.pad(a[..., :-1, :, :], (0, 0, 0, 0, 1, 0), value=beyond)
    after = F.pad(a[..., 1:, :, :], (0, 0, 0, 0, 0, 1), value=beyond)
    return torch.cat([before, a, after], -2)


def _aligned(source: Weights, size: int, offset: int, n: int) -> Tensor:
    """The source's blocks at ``offset`` laid out for all n query blocks; zero where there is no key block, for those keys are dead."""
    if n == 1 and offset:
        return torch.zeros_like(source.blocks(size, 0))
    w = source.blocks(size, offset)
    if offset == 0 or source.uniform:
        return w
    return F.pad(w, (0, 0, 0, 0, 1, 0) if offset > 0 else (0, 0, 0, 0, 0, 1))
