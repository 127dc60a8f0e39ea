"""Sums over causal, banded and windowed patterns of visible keys, assembled from the pieces in ``softmax``.

``reach`` = (low, high): the source's weights are zero unless low <= s - t <= high; ``None`` means no such limit.

Causal rows are built from the inside out. A leaf holds 8 tokens. Groups of up to 8 units (of 8, 64, 512, ... tokens)
follow, in which a row sees the units before its own; with a reach, the previous block and the sums of all older blocks
are added. All these keys lie before the row's leaf, so the 8 rows of a leaf share one maximum for them.
"""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.backend import lowers
from ...kernels.operator import Operator
from ..layout.masks import pad_zeros
from .softmax import (
    FAN,
    FLOOR,
    JUMP,
    LEAF,
    MASKED_KEY,
    Sums,
    cut_running_max,
    delay,
    join_blocks,
    literal,
    merge,
    merge_heads,
    over_all,
    over_leaf,
    products,
    ratio_of,
    scan,
    split_blocks,
    split_heads64,
    weigh,
)
from .weights import Banded, Toeplitz, Weights

Reach = tuple[int, int]
BLOCK = 16  # minimum number of rows per block of the product of factors


def causal_sums(k: Tensor, v: Tensor, source: Weights, *, reach: Reach | None = None) -> Sums:
    """Compute causal sums: row t sees keys 0..t."""
    T = k.shape[-2]
    block = None if reach is None or _block_size(reach) >= T else _block_size(reach)
    if block:
        k, v = (a.flatten(a.ndim - d, a.ndim - d + 1) for a, d in zip(split_blocks(k, v, block), (3, 4), strict=True))
    kb, vb = split_blocks(k, v, LEAF)
    m, terms = products(kb, vb)
    before, unit = [], LEAF
    while unit < (block or T) and not (block and unit * FAN >= block):
        before.append(_over_groups(m, terms, source, unit))
        unit *= FAN
    if block:
        before += [_over_blocks(m, terms, source, unit, block), _over_past(k, v, block)]
    leaf = over_leaf(kb, vb, source.blocks(LEAF, 0, kb.shape[-3]), jump=JUMP)
    return join_blocks(merge(leaf, reduce(merge, before)) if before else leaf, T)


def _over_groups(m: Tensor, terms: Tensor, source: Weights, unit: int) -> Sums:
    """Sum within groups of 8 units: each row sees the units before its own. The last group may be short."""
    leaves, span = m.shape[-3], unit * FAN // LEAF
    whole = leaves // span * span
    parts = []
    if whole:
        w = source.blocks(unit * FAN, 0, whole // span)
        parts.append(_over_units(m[..., :whole, :, :], terms[..., :whole, :, :, :], w, unit, whole // span))
    if whole < leaves:
        rest = slice(whole * LEAF, leaves * LEAF)
        parts.append(
            _over_units(
                m[..., whole:, :, :], terms[..., whole:, :, :, :], source.slab(rest, rest)[..., None, :, :], unit, 1
            )
        )
    return Sums(
        *(torch.cat(same, same[0].ndim - d) for same, d in zip(zip(*parts, strict=True), (3, 3, 4), strict=True))
    )


def _over_units(
    m: Tensor, terms: Tensor, w: Tensor, unit: int, groups: int, before: tuple[Tensor, Tensor, Tensor] | None = None
) -> Sums:
    """Sum the preceding units in each group: rows of unit i see units 0..i-1.

    ``before`` is the block before the group, counted as one more unit: its m, terms and weights.
    """
    m, terms = m.unflatten(-3, (groups, -1)), terms.unflatten(-4, (groups, -1))  # (..., groups, leaves, 1 or 8, ...)
    sizes = [min(unit // LEAF, m.shape[-3] - i) for i in range(0, m.shape[-3], unit // LEAF)]
    nothing = None if before is not None else _empty_sums(m[..., : sizes[0], :, :], terms)
    if before is not None:
        sizes = [before[0].shape[-3], *sizes]
        m, terms, w = torch.cat([before[0], m], -3), torch.cat([before[1], terms], -4), torch.cat([before[2], w], -1)
    elif len(sizes) > 1:
        w = w[..., sizes[0] * LEAF :, :]
    if len(sizes) == 1:
        assert nothing is not None
        return Sums(*(a.flatten(a.ndim - d - 1, a.ndim - d) for a, d in zip(nothing, (3, 3, 4), strict=True)))
    keys, owner = sum(sizes[:-1]), _owners(sizes)
    top, rise = cut_running_max(torch.cat([a.amax(-3) for a in m.split(sizes, -3)[:-1]], -2), JUMP)
    of_key = torch.tensor(owner[:keys], device=m.device)
    of_row = torch.tensor(owner[sizes[0] :], device=m.device)
    scale = (
        m[..., :keys, :, :] - top.index_select(-2, of_key)[..., None, :] + rise.index_select(-2, of_key)[..., None, :]
    )
    terms = (terms[..., :keys, :, :, :] * torch.exp(scale)[..., None, :]).flatten(-4, -3)
    seen = (of_row[:, None] > of_key).repeat_interleave(LEAF, 0).repeat_interleave(LEAF, 1)
    acc = weigh(w[..., : keys * LEAF].masked_fill(~seen, float("-inf")), terms).unflatten(-3, (-1, LEAF))
    base, lift = (a.index_select(-2, of_row - 1)[..., None, :] for a in (top, -rise))
    part = Sums(base, lift, acc)
    if nothing is not None:
        part = Sums(
            *(torch.cat(a, a[0].ndim - d) for a, d in zip(zip(nothing, part, strict=True), (3, 3, 4), strict=True))
        )
    return Sums(*(a.flatten(a.ndim - d - 1, a.ndim - d) for a, d in zip(part, (3, 3, 4), strict=True)))


def _owners(sizes: list[int]) -> list[int]:
    """Return the unit that each leaf belongs to: 0, 0, 1, 1, 2 for sizes 2, 2, 1."""
    return [unit for unit, size in enumerate(sizes) for _ in range(size)]


def _empty_sums(m: Tensor, terms: Tensor) -> Sums:
    """Return empty sums for leaves whose maximum is m (..., leaves, 1, c')."""
    none = torch.full_like(m, FLOOR)
    return Sums(none, torch.zeros_like(m), terms.new_zeros(*m.shape[:-2], LEAF, *terms.shape[-2:]))


def _over_blocks(m: Tensor, terms: Tensor, source: Weights, unit: int, block: int) -> Sums:
    """Sum over the units of every block, with the previous block as one more unit."""
    leaves = block // LEAF
    n = m.shape[-3] // leaves
    mg, tg = m.unflatten(-3, (n, leaves)), terms.unflatten(-4, (n, leaves))
    before_m = F.pad(mg[..., :-1, :, :, :], (0, 0, 0, 0, 0, 0, 1, 0), value=FLOOR)
    before_terms = F.pad(tg[..., :-1, :, :, :, :], (0, 0, 0, 0, 0, 0, 0, 0, 1, 0))
    return _over_units(
        m, terms, source.blocks(block, 0, n), unit, n, (before_m, before_terms, _align_blocks(source, block, 1, n))
    )


def _over_past(k: Tensor, v: Tensor, block: int) -> Sums:
    """Return, for every leaf, the sums of the blocks older than the previous one, whose weight is exp(0)."""
    past = delay(scan(over_all(*split_blocks(k, v, block))), 2)
    return Sums(*(a.repeat_interleave(block // LEAF, a.ndim - d) for a, d in zip(past, (3, 3, 4), strict=True)))


def band_sums(k: Tensor, v: Tensor, source: Weights, *, reach: Reach) -> Sums:
    """Compute sums in which every row sees every key under one maximum; weights are non-zero only inside the reach."""
    T, size = k.shape[-2], _block_size(reach)
    m, terms = products(k, v)
    terms = F.pad(terms, (0, 0, 0, 0, 0, -T % size)).unflatten(-3, (-1, size))
    near = weigh(_window_weights(source, size, terms.shape[-4]), _neighbours(terms, 4, 0.0))
    sums = terms.sum(-3, keepdim=True)
    total = near + _sum_older_blocks(sums) + _sum_older_blocks(sums.flip(-4)).flip(-4)
    return Sums(m, torch.zeros_like(m), total.flatten(-4, -3)[..., :T, :, :])


def _sum_older_blocks(sums: Tensor) -> Tensor:
    """Return, for block i, the sum of blocks 0..i-2, formed from positive terms only."""
    return F.pad(sums.cumsum(-4), (0, 0, 0, 0, 0, 0, 2, 0))[..., : sums.shape[-4], :, :, :]


def window_ratio(k: Tensor, v: Tensor, source: Weights, *, reach: Reach) -> Tensor:
    """Compute the ratio when row t sees only keys inside the reach.

    Each row has a maximum of its own, because a key outside may be arbitrarily larger.
    """
    T, size = k.shape[-2], _block_size(reach)
    kb, vb = split_blocks(k, v, size)
    i = torch.arange(size, device=k.device)
    distance = torch.cat([i - size, i, i + size]) - i[:, None]
    kn, vn = _neighbours(kb, 3, MASKED_KEY), _neighbours(vb, 4, 0.0)
    inside = (distance >= reach[0]) & (distance <= reach[1]) & (kn.detach()[..., :1] > FLOOR).transpose(-1, -2)
    return literal(kn, vn, _window_weights(source, size, kb.shape[-3]), inside).flatten(-3, -2)[..., :T, :]


def _block_size(reach: Reach) -> int:
    size = LEAF
    while size < max(-reach[0], reach[1]):
        size *= 2
    return size


def _neighbours(a: Tensor, dims: int, beyond: float) -> Tensor:
    """Lay blocks i-1, i, i+1 side by side along the token axis, with ``beyond`` outside the sequence.

    Blocks lie on dim -dims, tokens on the next.
    """
    pad, n, axis = (0, 0) * (dims - 1), a.shape[-dims], a.ndim - dims
    before = F.pad(a.narrow(axis, 0, n - 1), (*pad, 1, 0), value=beyond)
    after = F.pad(a.narrow(axis, 1, n - 1), (*pad, 0, 1), value=beyond)
    return torch.cat([before, a, after], axis + 1)


def _window_weights(source: Weights, size: int, n: int) -> Tensor:
    """Return (..., n or 1, size, 3 size): each block's weights for the previous block, itself and the next block."""
    return torch.cat([_align_blocks(source, size, o, n) for o in (1, 0, -1)], -1)


def _align_blocks(source: Weights, size: int, offset: int, n: int) -> Tensor:
    """Lay out the source's blocks at ``offset`` for all n query blocks.

    They are zero where there is no key block: those keys are masked.
    """
    if n == 1 and offset:
        return torch.zeros_like(source.blocks(size, 0, n))
    w = source.blocks(size, offset, n)
    if offset == 0 or source.uniform:
        return w
    return F.pad(w, (0, 0, 0, 0, 1, 0) if offset > 0 else (0, 0, 0, 0, 0, 1))


def band_of(w: Tensor | tuple[Tensor, Tensor], window: int, causal: bool) -> Tensor:
    """Return the band |t - s| < window of log-weights, and s <= t when causal: float32 (1 or B, 1, T, L).

    Entries outside the sequence are arbitrary. Of a product of factors only the band is formed, in float64, because its
    rounding would be an error of every weight.

    Args:
        w: log-weights (T, T) or (B, T, T), or a pair of factors (T, r) or (B, T, r); or taps (L,), the same in all
            rows, which give (1, 1, 1, L).
        window: in tokens; L = window if causal, else 2 window - 1, with window limited to T.
        causal: leave out keys s > t.
    """
    if not isinstance(w, tuple) and w.ndim == 1:
        return w.float()[None, None, None]
    T, low = (w[0] if isinstance(w, tuple) else w).shape[-2], window - 1
    if lowers():  # T may be a symbol
        w = w[0] @ w[1].mT if isinstance(w, tuple) else w
    else:
        low = min(low, T - 1)
    high = 0 if causal else low
    found = _of_factors(*w, low, high) if isinstance(w, tuple) else _of_matrix(w, low, high)
    return (found if found.ndim == 3 else found[None]).float()[:, None]


def _of_matrix(w: Tensor, low: int, high: int) -> Tensor:
    T = w.shape[-1]
    t, j = (torch.arange(n, device=w.device) for n in (T, low + 1 + high))
    return w.gather(-1, (t[:, None] + j - low).clamp(0, T - 1).expand(*w.shape[:-2], -1, -1))


def _of_factors(u: Tensor, v: Tensor, low: int, high: int) -> Tensor:
    T, width = u.shape[-2], low + 1 + high
    rows = max(BLOCK, min(width, T))
    blocks = -(-T // rows)
    u = pad_zeros(u.double(), (0, 0, 0, blocks * rows - T)).unflatten(-2, (blocks, rows))
    v = pad_zeros(v.double(), (0, 0, low, blocks * rows - T + high))
    v = v.unfold(-2, rows + width - 1, rows)  # (..., blocks, r, keys)
    i, j = (torch.arange(n, device=u.device) for n in (rows, width))
    product = u @ v
    return product.gather(-1, (i[:, None] + j).expand(*product.shape[:-2], -1, -1)).flatten(-3, -2)[..., :T, :]


def _run_eager(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, key_mask: Tensor | None, causal: bool) -> Tensor:
    D, L = v.shape[-1], w.shape[-1]
    kd, vd = split_heads64(k, v, key_mask, k.shape[-1] if k.shape[-1] != D or w.shape[1] > 1 else 1)
    low = L - 1 if causal else L // 2
    source = Toeplitz(w[:, :, 0], low) if w.shape[-2] == 1 else Banded(w, low)
    sums = (
        causal_sums(kd, vd, source, reach=(-low, 0)) if causal else band_sums(kd, vd, source, reach=(-low, L - 1 - low))
    )
    y = merge_heads(ratio_of(sums))
    return (y if q is None else torch.sigmoid(q) * y).to(v.dtype)


aft_band = Operator(
    "aft_band",
    "q?(B,T,D) k(B,T,h) v(B,T,D) w(B|1,H|1,R,L):float32 key_mask?!(B,T):bool",
    "bool causal",
    saves=("saved",),
    keeps_result=True,
    shape=lambda q, k, v, w, key_mask, *, causal: v.shape,
    eager=_run_eager,
    fits=lambda at, _: (
        at["L"] > 0
        and at["h"] > 0
        and at["D"] % at["h"] == 0
        and at.get("H", at["h"]) == at["h"]
        and (at["R"] == 1 or at["R"] == at["T"] and "H" not in at and at["h"] == at["D"])
    ),
    on=("cpu", "triton", "onnx"),
)
"""Compute AFT-local or one-dimensional AFT-conv, (B, T, D).

The result is sigmoid(q) times the ratio of sums, or the ratio alone if q is None. k is (B, T, D), or (B, T, h) with one
key per head. Log-weights w (1 or B, 1 or h, 1 or T, L) are float32, whatever the dtype of q, k and v. Entry j of row t
belongs to key t + j - low, with low = L - 1 when causal and L // 2 otherwise.
"""
