"""Sums of exp(k + w) v and exp(k + w) over keys, exact for any finite keys, without a branch on values.

A partial sum is carried as (m, num, den): num and den are scaled by exp(-m). The scale is data, not mathematics: it cancels in num / den, so it is
computed without gradient. Where all rows see the same keys one maximum per feature is safe: in float64 a key 600 below it cannot matter while
weights span less than 600. Rows of one causal leaf see different keys; there the running maximum is followed, and each of its rises is cut to
``jump``: what lies more than ``jump`` below is negligible (exp(-42) < float64's eps) and the cut keeps every exponent of the leaf inside float64's range.

Shapes: keys k (..., S, c') with c' = c, or 1 where one key serves all features of a head; values v (..., S, c); weights (..., T, S).
``live`` (..., S, 1) is 1 for keys that may be attended and 0 for others, whose k must be NEG. Everything is float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NEG = -1e30  # stands for -inf in scales: finite, so that differences of two of them are 0 and not NaN
LEAF, LEAF_JUMP = 8, 150.0  # 7 rises of 150, centred, and weights spanning 120 stay within exp(+-700); exp(120 - 150) is negligible
SCAN, SCAN_JUMP = 32, 42.0  # the same without weights
LITERAL_ELEMENTS = 2**22  # (rows, keys, features) held at once where every row needs its own maximum


class Sums(NamedTuple):
    """num = sum exp(k + w - m) v and den = sum exp(k + w - m), for rows (..., T, c)."""

    m: Tensor
    num: Tensor
    den: Tensor


def merge(a: Sums, b: Sums) -> Sums:
    """The sums over two disjoint sets of keys."""
    m = torch.maximum(a.m, b.m)
    ea, eb = torch.exp(a.m - m), torch.exp(b.m - m)
    return Sums(m, a.num * ea + b.num * eb, a.den * ea + b.den * eb)


def ratio(s: Sums) -> Tensor:
    """num / den, and exactly 0 where nothing was summed."""
    return s.num / torch.where(s.den > 0, s.den, 1.0)


def over_all(k: Tensor, v: Tensor, live: Tensor | None) -> Sums:
    """One row (..., 1, c): every key, with weight 0."""
    m = k.detach().amax(-2, keepdim=True)
    e = torch.exp(k - m)
    if live is not None:
        e = e * live
    return Sums(m, (e * v).sum(-2, keepdim=True), e.sum(-2, keepdim=True))


def over_visible(k: Tensor, v: Tensor, w: Tensor, live: Tensor | None) -> Sums:
    """T rows that all see the same keys, row t with weights w_t."""
    mk, mw = k.detach().amax(-2, keepdim=True), w.detach().amax(-1, keepdim=True)
    e = torch.exp(k - mk)
    if live is not None:
        e = e * live
    ew = torch.exp(w - mw)
    return Sums(mk + mw, ew @ (e * v), ew @ e)


def over_leaf(k: Tensor, v: Tensor, w: Tensor | None, live: Tensor | None, *, jump: float) -> Sums:
    """Row t of L sees keys 0..t."""
    size = k.shape[-2]
    seen = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
    top = _running_max(k.detach())
    rise = F.pad((top[..., 1:, :] - top[..., :-1, :]).clamp_max(jump).cumsum(-2), (0, 0, 1, 0))
    rise = rise - rise[..., -1:, :] / 2
    e = torch.exp(k + (rise - top))
    if live is not None:
        e = e * live
    if w is None:
        ew, m = seen.to(k.dtype), top
    else:
        mw = w.detach().masked_fill(~seen, NEG).amax(-1, keepdim=True)
        ew, m = torch.exp((w - mw).masked_fill(~seen, float("-inf"))), top + mw
    back = torch.exp(-rise)
    return Sums(m, (ew @ (e * v)) * back, (ew @ e) * back)


def literal(k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    """num / den under each row's own maximum over the pairs ``mask`` (..., T, S) allows, a few rows at a time: for patterns without structure."""
    T, S = w.shape[-2:]
    rows = max(1, LITERAL_ELEMENTS // max(1, v.numel()))
    parts = []
    for start in range(0, T, rows):
        here = slice(start, min(start + rows, T))
        keep = mask[..., here, :, None]
        z = k[..., None, :, :] + w[..., here, :, None]
        top = z.detach().masked_fill(~keep, NEG).amax(-2, keepdim=True)
        e = torch.exp((z - top).masked_fill(~keep, float("-inf")))
        parts.append(ratio(Sums(top, (e * v[..., None, :, :]).sum(-2), e.sum(-2))))
    return torch.cat(parts, -2)


def _running_max(k: Tensor) -> Tensor:
    """Inclusive maximum over 0..t along dim -2, by doubling: a form every exporter knows."""
    step = 1
    while step < k.shape[-2]:
        k = torch.cat([k[..., :step, :], torch.maximum(k[..., step:, :], k[..., :-step, :])], -2)
        step *= 2
    return k


def scan(s: Sums) -> Sums:
    """Inclusive prefix sums over blocks (..., n, 1, c), by doubling."""
    step = 1
    while step < s.m.shape[-3]:
        later = merge(Sums(*(a[..., step:, :, :] for a in s)), Sums(*(a[..., :-step, :, :] for a in s)))
        s = Sums(*(torch.cat([a[..., :step, :, :], b], -3) for a, b in zip(s, later, strict=True)))
        step *= 2
    return s


def delay(s: Sums, blocks: int) -> Sums:
    """Block i of the result is block i - blocks; an empty sum where there is none."""
    n = s.m.shape[-3]
    pad = (0, 0, 0, 0, min(blocks, n), 0)
    kept = max(n - blocks, 0)
    return Sums(F.pad(s.m[..., :kept, :, :], pad, value=NEG), *(F.pad(a[..., :kept, :, :], pad) for a in s[1:]))


def flip(s: Sums) -> Sums:
    """Blocks in reverse order: a suffix scan is a flipped prefix scan of the flipped blocks."""
    return Sums(*(a.flip(-3) for a in s))


def prefix_sums(k: Tensor, v: Tensor, live: Tensor | None) -> Sums:
    """Row t sees keys 0..t with weight 0; k (..., T, c)."""
    T, size = k.shape[-2], min(SCAN, k.shape[-2])
    k, v, live = blocked(k, v, live, size)
    total = over_leaf(k, v, None, live, jump=SCAN_JUMP)
    if k.shape[-3] > 1:
        total = merge(total, delay(scan(over_all(k, v, live)), 1))
    return Sums(*(a.flatten(-3, -2)[..., :T, :] for a in total))


def blocked(k: Tensor, v: Tensor, live: Tensor | None, size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cut the time axis into blocks (..., n, size, c); the padding at the end weighs nothing."""
    pad = (0, 0, 0, -k.shape[-2] % size)
    kb, vb = (F.pad(a, pad, value=fill).unflatten(-2, (-1, size)) for a, fill in ((k, NEG), (v, 0.0)))
    return kb, vb, None if live is None else F.pad(live, pad).unflatten(-2, (-1, size))
