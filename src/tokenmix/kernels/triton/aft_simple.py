"""Run AFT-simple in Triton: y_t = gate(q_t) * sum_s e^{k_s} v_s / sum_s e^{k_s}, over s <= t or all s.

All features are independent. Causal: time is cut into chunks of 64 tokens. There are three launches: the triple (m,
num, den) of each chunk, where m is its largest key; the triples of all chunks before each; the outputs. A program
owns a chunk and a strip of features and walks the chunk in tiles of a few tokens; each thread holds whole columns of
a tile, so that sums along time need no exchange. A tile whose keys stay within 60 above the running maximum is summed
under one maximum, with one exponential per key; any other takes the recurrence row by row, which is exact for any
finite keys. Sums restart from the chunk's triple, and the triples are joined in float64, so long sums do not drift.

Backward: with a_t = e^{k_t} / D_t and b_t = D_{t-1} / D_t, both at most 1,
    r_t = g_t + b_{t+1} r_{t+1},  p_t = g_t y_t + b_{t+1} p_{t+1},  dv_t = a_t r_t,  dk_t = a_t (v_t r_t - p_t),
again in three launches: what each chunk passes to those before it, the sums of that over later chunks, the gradients.
The sums are kept as r_t / D_t and p_t / D_t in units of e^-m, m the running maximum, so that no product of many b is
formed. The first launch also records the triple at the start of each tile, so that the last can walk the tiles
backwards.

Packed sequences: ``start`` marks the first token of each, where the sums restart. If q is None there is no gate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ._tiles import span
from .launch import bytes_of, launch

CHUNK = 64  # tokens between two saved triples
SAFE = tl.constexpr(60.0)  # a tile's keys may lie this far above the running maximum and still share one
FLOOR = tl.constexpr(-(2.0 - 2.0**-22) * 2.0**127)  # the least maximum: finite, so that no difference is NaN
DEAD = tl.constexpr(-(2.0 - 2.0**-23) * 2.0**127)  # the key of a masked token: e^(DEAD - FLOOR) is 0


@triton.jit
def _place(T, D, CHUNK: tl.constexpr, BD: tl.constexpr):
    """Return what a program works on: its row of the batch, its chunk, the number of chunks, its features."""
    strips, chunks = tl.cdiv(D, BD), tl.cdiv(T, CHUNK)
    i = tl.program_id(0)
    od = tl.max_contiguous(
        i % strips * BD + tl.arange(0, BD), BD // 32
    )  # neighbours of one thread, so that 32 threads span the strip and a column is one thread's
    return (i // strips // chunks).to(tl.int64), i // strips % chunks, chunks, od


@triton.jit
def _valid_tokens(MASK, b, t, T):
    """Say which of these tokens are valid."""
    ok = t < T
    if MASK is not None:
        ok = ok & (tl.load(MASK + b * T + t, mask=ok, other=0) != 0)
    return ok


@triton.jit
def _keys(K, V, at_k, at_v, ok):
    """Load keys and values of a tile in float32; masked ones are DEAD and 0 whatever they hold."""
    k = tl.load(K + at_k, mask=ok, other=DEAD).to(tl.float32)
    return tl.maximum(k, DEAD, propagate_nan=tl.PropagateNan.ALL), tl.load(V + at_v, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _triple(S, b, c, chunks, D, od):
    """Load a triple (m, num, den) of S (B, chunks, 3, D)."""
    p = S + (b * chunks + c) * 3 * D + od
    return (
        tl.load(p, mask=od < D, other=FLOOR),
        tl.load(p + D, mask=od < D, other=0.0),
        tl.load(p + 2 * D, mask=od < D, other=0.0),
    )


@triton.jit
def _keep(S, b, c, chunks, D, od, m, num, den):
    p = S + (b * chunks + c) * 3 * D + od
    tl.store(p, m, mask=od < D)
    tl.store(p + D, num, mask=od < D)
    tl.store(p + 2 * D, den, mask=od < D)


@triton.jit
def _row(x, rows, i):
    """Return row i of a tile, summed as integers, because a sum with 0 folds away where i is a constant."""
    return tl.sum(tl.where(rows[:, None] == i, x.to(tl.int32, bitcast=True), 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def _suffix(x, rest, rows, ROWS: tl.constexpr):
    """Sum along a tile from its last row up, after ``rest``; a reversed scan would exchange data between threads."""
    y = tl.zeros_like(x)
    for i in tl.static_range(ROWS):
        rest += _row(x, rows, ROWS - 1 - i)
        y = tl.where(rows[:, None] == ROWS - 1 - i, rest[None, :], y)
    return y


@triton.jit
def _divide(a, b):
    """Compute a / b, and 0 where b is 0."""
    return tl.where(b == 0, 0.0, a / tl.where(b == 0, 1.0, b))


@triton.jit
def _starts(START, b, t, T):
    return tl.load(START + b * T + t, mask=t < T, other=0).to(tl.int32)


@triton.jit
def totals(K, V, MASK, START, TOTAL, T, D, kb, kt, vb, vt, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """Compute the triple of each chunk; with START, of what follows its last start."""
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows = tl.arange(0, ROWS)
    K += b * kb + c.to(tl.int64) * CHUNK * kt
    V += b * vb + c.to(tl.int64) * CHUNK * vt
    m, num, den = tl.full([BD], FLOOR, tl.float32), tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for i in range(0, CHUNK, ROWS):
        t = c * CHUNK + i + rows
        ok = _valid_tokens(MASK, b, t, T)
        if START is not None:
            last = tl.max(tl.where(_starts(START, b, t, T) != 0, rows, -1), 0)
            ok = ok & (rows >= last)
            m = tl.where(last >= 0, FLOOR, m)
            num, den = tl.where(last >= 0, 0.0, num), tl.where(last >= 0, 0.0, den)
        k, v = _keys(
            K,
            V,
            (i + rows)[:, None] * kt + od[None, :],
            (i + rows)[:, None] * vt + od[None, :],
            ok[:, None] & (od < D)[None, :],
        )
        top = tl.maximum(m, tl.max(k, 0))
        old, e = tl.exp(m - top), tl.exp(k - top[None, :])
        num, den, m = num * old + tl.sum(e * v, 0), den * old + tl.sum(e, 0), top
    _keep(TOTAL, b, c, chunks, D, od, m, num, den)


@triton.jit
def _join(m1, n1, d1, m2, n2, d2):
    m = tl.maximum(m1, m2)
    a, b = tl.exp(m1 - m), tl.exp(m2 - m)
    return m, n1 * a + n2 * b, d1 * a + d2 * b


@triton.jit
def _join_wide(m1, n1, d1, m2, n2, d2):
    """Join two triples, the first in float64."""
    m = tl.maximum(m1, m2)
    a, b = tl.exp(m1 - m).to(tl.float64), tl.exp(m2 - m).to(tl.float64)
    return m, n1 * a + n2.to(tl.float64) * b, d1 * a + d2.to(tl.float64) * b


@triton.jit
def carry(TOTAL, FRESH, BEFORE, chunks, D, ROWS: tl.constexpr, BD: tl.constexpr):
    """Join the triples of all chunks before each; FRESH (B, chunks) marks chunks in which a sequence starts."""
    b = tl.program_id(1).to(tl.int64)
    od, rows = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, ROWS)
    m, num, den = tl.full([BD], FLOOR, tl.float32), tl.zeros([BD], tl.float64), tl.zeros([BD], tl.float64)
    for first in span(0, chunks, ROWS, num_stages=2):
        ok = (first + rows < chunks)[:, None] & (od < D)[None, :]
        p = TOTAL + (b * chunks + first + rows)[:, None] * 3 * D + od[None, :]
        ms, ns, ds = (
            tl.load(p, mask=ok, other=FLOOR),
            tl.load(p + D, mask=ok, other=0.0),
            tl.load(p + 2 * D, mask=ok, other=0.0),
        )
        for i in tl.static_range(ROWS):
            ok = (od < D) & (first + i + tl.zeros([BD], tl.int32) < chunks)
            p = BEFORE + (b * chunks + first + i) * 3 * D + od
            tl.store(p, m, mask=ok)
            tl.store(p + D, num.to(tl.float32), mask=ok)
            tl.store(p + 2 * D, den.to(tl.float32), mask=ok)
            if FRESH is not None:
                anew = tl.load(FRESH + b * chunks + tl.minimum(first + i, chunks - 1)) != 0
                m, num, den = tl.where(anew, FLOOR, m), tl.where(anew, 0.0, num), tl.where(anew, 0.0, den)
            m, num, den = _join_wide(m, num, den, _row(ms, rows, i), _row(ns, rows, i), _row(ds, rows, i))


@triton.jit
def _reset_triple(starts, rows, i, m, num, den):
    """Return the triple before row i, reset if a sequence starts there."""
    fresh = tl.sum(tl.where(rows == i, starts, 0), 0) != 0
    return tl.where(fresh, FLOOR, m), tl.where(fresh, 0.0, num), tl.where(fresh, 0.0, den)


@triton.jit
def _sums(k, v, starts, anew, rows, m, num, den, ROWS: tl.constexpr):
    """Sum along a tile after the triple (m, num, den), and return y and the triple after the tile."""
    top = tl.maximum(m, tl.max(k, 0))
    if (tl.max(top - m, 0) < SAFE) & (anew == 0):
        e, old = tl.exp(k - top[None, :]), tl.exp(m - top)
        n, d = tl.cumsum(e * v, 0) + (num * old)[None, :], tl.cumsum(e, 0) + (den * old)[None, :]
        num, den, m = _row(n, rows, ROWS - 1), _row(d, rows, ROWS - 1), top
    else:
        n, d = tl.zeros_like(k), tl.zeros_like(k)
        for i in range(ROWS):
            m, num, den = _reset_triple(starts, rows, i, m, num, den)
            m, num, den = _step(_row(k, rows, i), _row(v, rows, i), m, num, den)
            n, d = tl.where(rows[:, None] == i, num[None, :], n), tl.where(rows[:, None] == i, den[None, :], d)
    return n, d, m, num, den


@triton.jit
def outputs(
    Q,
    K,
    V,
    MASK,
    START,
    BEFORE,
    Y,
    T,
    D,
    qb,
    qt,
    kb,
    kt,
    vb,
    vt,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
):
    """Compute y of each chunk from the triple before it."""
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    K += b * kb + first * kt
    V += b * vb + first * vt
    Y += (b * T + first) * D
    if Q is not None:
        Q += b * qb + first * qt
    m, num, den = _triple(BEFORE, b, c, chunks, D, od)
    for i in range(0, CHUNK, ROWS):
        t, r = c * CHUNK + i + rows, (i + rows)[:, None]
        inside = (t < T)[:, None] & (od < D)[None, :]
        starts = tl.zeros([ROWS], tl.int32)
        if START is not None:
            starts = _starts(START, b, t, T)
        k, v = _keys(
            K, V, r * kt + od[None, :], r * vt + od[None, :], _valid_tokens(MASK, b, t, T)[:, None] & (od < D)[None, :]
        )
        if Q is not None:
            gate = 1.0 + tl.exp(-tl.load(Q + r * qt + od[None, :], mask=inside, other=0.0).to(tl.float32))
        n, d, m, num, den = _sums(k, v, starts, tl.max(starts, 0), rows, m, num, den, ROWS)
        none = d == 0
        if Q is not None:
            d *= gate
        tl.store(Y + r * D + od[None, :], tl.where(none, 0.0, n / d), mask=inside)


@triton.jit
def _replay(k, v, starts, anew, rows, m, num, den, ref, open, ROWS: tl.constexpr):
    """Return y_t and e^ref / D_t of each row, 0 once a sequence started; the triple after; and whether none started."""
    top = tl.maximum(m, tl.max(k, 0))
    if (tl.max(top - m, 0) < SAFE) & (anew == 0):
        e, old = tl.exp(k - top[None, :]), tl.exp(m - top)
        n, d = tl.cumsum(e * v, 0) + (num * old)[None, :], tl.cumsum(e, 0) + (den * old)[None, :]
        share = _divide(1.0, d)
        y, share = n * share, (open * tl.exp(tl.minimum(ref - top, 0.0)))[None, :] * share
        num, den, m = _row(n, rows, ROWS - 1), _row(d, rows, ROWS - 1), top
    else:
        y, share = tl.zeros_like(k), tl.zeros_like(k)
        for i in range(ROWS):
            m, num, den = _reset_triple(starts, rows, i, m, num, den)
            open = tl.where(tl.sum(tl.where(rows == i, starts, 0), 0) != 0, 0.0, open)
            m, num, den = _step(_row(k, rows, i), _row(v, rows, i), m, num, den)
            inverse, here = _divide(1.0, den), rows[:, None] == i
            y, share = (
                tl.where(here, (num * inverse)[None, :], y),
                tl.where(here, (open * tl.exp(tl.minimum(ref - m, 0.0)) * inverse)[None, :], share),
            )
    return y, share, m, num, den, open


@triton.jit
def _step(kk, vv, m, num, den):
    """Add one key to the triple."""
    return _join(
        m, num, den, tl.maximum(kk, FLOOR, propagate_nan=tl.PropagateNan.ALL), vv, tl.where(kk > DEAD, 1.0, 0.0)
    )


@triton.jit
def back_totals(
    G, Q, K, V, MASK, START, BEFORE, TILES, HANDED, T, D, gb, gt, qb, qt, kb, kt, vb, vt, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute what each chunk passes to those before it, HANDED (B, chunks, 3, D).

    These are its sums of g_t e^m / D_t and g_t y_t e^m / D_t, m the maximum before it, and whether later chunks' sums
    pass through it. TILES (B, chunks * CHUNK / ROWS, 3, D) receives the triple before each tile.
    """
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    K += b * kb + first * kt
    V += b * vb + first * vt
    G += b * gb + first * gt
    if Q is not None:
        Q += b * qb + first * qt
    m, num, den = _triple(BEFORE, b, c, chunks, D, od)
    ref, open, r, p = m, tl.full([BD], 1.0, tl.float32), tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for i in range(0, CHUNK, ROWS):
        _keep(TILES, b, c * (CHUNK // ROWS) + i // ROWS, chunks * (CHUNK // ROWS), D, od, m, num, den)
        t, at = c * CHUNK + i + rows, (i + rows)[:, None]
        inside = (t < T)[:, None] & (od < D)[None, :]
        starts = tl.zeros([ROWS], tl.int32)
        if START is not None:
            starts = _starts(START, b, t, T)
        k, v = _keys(
            K,
            V,
            at * kt + od[None, :],
            at * vt + od[None, :],
            _valid_tokens(MASK, b, t, T)[:, None] & (od < D)[None, :],
        )
        g = tl.load(G + at * gt + od[None, :], mask=inside, other=0.0).to(tl.float32)
        if Q is not None:
            g *= tl.sigmoid(tl.load(Q + at * qt + od[None, :], mask=inside, other=0.0).to(tl.float32))
        y, share, m, num, den, open = _replay(k, v, starts, tl.max(starts, 0), rows, m, num, den, ref, open, ROWS)
        r += tl.sum(g * share, 0)
        p += tl.sum(g * y * share, 0)
    _keep(HANDED, b, c, chunks, D, od, r, p, open)


@triton.jit
def back_carry(HANDED, BEFORE, AFTER, chunks, D, ROWS: tl.constexpr, BD: tl.constexpr):
    """Compute AFTER (B, chunks, 2, D): what all later chunks pass to each, times e^m, m the maximum at its end."""
    b = tl.program_id(1).to(tl.int64)
    od, rows = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, ROWS)
    r, p, end = tl.zeros([BD], tl.float64), tl.zeros([BD], tl.float64), tl.full([BD], FLOOR, tl.float32)
    for done in span(0, chunks, ROWS, num_stages=2):
        last = chunks - 1 - done
        ok = (last - rows >= 0)[:, None] & (od < D)[None, :]
        at = (b * chunks + last - rows)[:, None] * 3 * D + od[None, :]
        rs, ps = tl.load(HANDED + at, mask=ok, other=0.0), tl.load(HANDED + at + D, mask=ok, other=0.0)
        opens, ms = tl.load(HANDED + at + 2 * D, mask=ok, other=0.0), tl.load(BEFORE + at, mask=ok, other=FLOOR)
        for i in tl.static_range(ROWS):
            ok = (od < D) & (last - i + tl.zeros([BD], tl.int32) >= 0)
            to = AFTER + (b * chunks + last - i) * 2 * D + od
            tl.store(to, r.to(tl.float32), mask=ok)
            tl.store(to + D, p.to(tl.float32), mask=ok)
            m = _row(ms, rows, i)
            factor = (_row(opens, rows, i) * tl.exp(tl.minimum(m - end, 0.0))).to(tl.float64)
            r, p, end = _row(rs, rows, i).to(tl.float64) + factor * r, _row(ps, rows, i).to(tl.float64) + factor * p, m


@triton.jit
def _derive_tile(k, v, g, starts, anew, rows, m, num, den, r, p, end, ROWS: tl.constexpr):
    """Compute y, dk, dv of a tile and what it passes on.

    Given are the triple before it, (r, p) e^-end passed to it, and g already times the gate.
    """
    top = tl.maximum(m, tl.max(k, 0))
    if (tl.max(top - m, 0) < SAFE) & (anew == 0):
        e, old, later = tl.exp(k - top[None, :]), tl.exp(m - top), tl.exp(tl.minimum(top - end, 0.0))
        d = _divide(1.0, tl.cumsum(e, 0) + (den * old)[None, :])
        y, g = (tl.cumsum(e * v, 0) + (num * old)[None, :]) * d, g * d
        rs, ps = _suffix(g, r * later, rows, ROWS), _suffix(g * y, p * later, rows, ROWS)
        dv, dk = e * rs, e * (v * rs - ps)
        r, p, end = _row(rs, rows, 0), _row(ps, rows, 0), top
    else:
        y, d, ms, dv, dk = tl.zeros_like(k), tl.zeros_like(k), tl.zeros_like(k), tl.zeros_like(k), tl.zeros_like(k)
        for i in range(ROWS):
            m, num, den = _reset_triple(starts, rows, i, m, num, den)
            m, num, den = _step(_row(k, rows, i), _row(v, rows, i), m, num, den)
            here, inverse = rows[:, None] == i, _divide(1.0, den)
            y, d, ms = (
                tl.where(here, (num * inverse)[None, :], y),
                tl.where(here, inverse[None, :], d),
                tl.where(here, m[None, :], ms),
            )
        for j in range(ROWS):
            i = ROWS - 1 - j
            mm, gg = _row(ms, rows, i), _row(g, rows, i) * _row(d, rows, i)
            later, here = tl.exp(tl.minimum(mm - end, 0.0)), rows[:, None] == i
            r, p, end = r * later + gg, p * later + gg * _row(y, rows, i), mm
            dv, dk = tl.where(here, r[None, :], dv), tl.where(here, p[None, :], dk)
            first = tl.sum(tl.where(rows == i, starts, 0), 0) != 0
            r, p = tl.where(first, 0.0, r), tl.where(first, 0.0, p)
        e = tl.exp(k - ms)
        dv, dk = e * dv, e * (v * dv - dk)
    return y, dk, dv, r, p, end


@triton.jit
def gradients(
    G, Q, K, V, MASK, START, BEFORE, TILES, AFTER, DQ, DK, DV, T, D, gb, gt, qb, qt, kb, kt, vb, vt,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute dq, dk, dv of each chunk, its tiles from the last to the first."""
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    K += b * kb + first * kt
    V += b * vb + first * vt
    G += b * gb + first * gt
    DK += (b * T + first) * D
    DV += (b * T + first) * D
    if Q is not None:
        Q += b * qb + first * qt
        DQ += (b * T + first) * D
    AFTER += (b * chunks + c) * 2 * D + od
    r, p = tl.load(AFTER, mask=od < D, other=0.0), tl.load(AFTER + D, mask=od < D, other=0.0)
    end = tl.load(
        BEFORE + (b * chunks + c + 1) * 3 * D + od,
        mask=(od < D) & (c + 1 + tl.zeros([BD], tl.int32) < chunks),
        other=FLOOR,
    )
    for j in range(0, CHUNK, ROWS):
        i = CHUNK - ROWS - j
        m, num, den = _triple(TILES, b, c * (CHUNK // ROWS) + i // ROWS, chunks * (CHUNK // ROWS), D, od)
        t, at = c * CHUNK + i + rows, (i + rows)[:, None]
        inside = (t < T)[:, None] & (od < D)[None, :]
        starts = tl.zeros([ROWS], tl.int32)
        if START is not None:
            starts = _starts(START, b, t, T)
        k, v = _keys(
            K,
            V,
            at * kt + od[None, :],
            at * vt + od[None, :],
            _valid_tokens(MASK, b, t, T)[:, None] & (od < D)[None, :],
        )
        g = tl.load(G + at * gt + od[None, :], mask=inside, other=0.0).to(tl.float32)
        if Q is not None:
            s = tl.sigmoid(tl.load(Q + at * qt + od[None, :], mask=inside, other=0.0).to(tl.float32))
            g *= s
        y, dk, dv, r, p, end = _derive_tile(k, v, g, starts, tl.max(starts, 0), rows, m, num, den, r, p, end, ROWS)
        if Q is not None:
            tl.store(DQ + at * D + od[None, :], g * y * (1.0 - s), mask=inside)
        tl.store(DK + at * D + od[None, :], dk, mask=inside)
        tl.store(DV + at * D + od[None, :], dv, mask=inside)


@triton.jit
def all_join(TOTAL, SAVED, chunks, D, ROWS: tl.constexpr, BD: tl.constexpr):
    """Compute SAVED (B, 1, 3, D): the largest key, the mean value and 1 / denominator over all chunks."""
    b = tl.program_id(1).to(tl.int64)
    od, rows = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, ROWS)
    m, num, den = tl.full([BD], FLOOR, tl.float32), tl.zeros([BD], tl.float64), tl.zeros([BD], tl.float64)
    for first in span(0, chunks, ROWS, num_stages=2):
        ok = (first + rows < chunks)[:, None] & (od < D)[None, :]
        p = TOTAL + (b * chunks + first + rows)[:, None] * 3 * D + od[None, :]
        ms, ns, ds = (
            tl.load(p, mask=ok, other=FLOOR),
            tl.load(p + D, mask=ok, other=0.0),
            tl.load(p + 2 * D, mask=ok, other=0.0),
        )
        for i in tl.static_range(ROWS):
            m, num, den = _join_wide(m, num, den, _row(ms, rows, i), _row(ns, rows, i), _row(ds, rows, i))
    none = den == 0
    den = tl.where(none, 1.0, den)
    _keep(
        SAVED,
        b,
        0,
        1,
        D,
        od,
        m,
        tl.where(none, 0.0, num / den).to(tl.float32),
        tl.where(none, 0.0, 1.0 / den).to(tl.float32),
    )


@triton.jit
def all_outputs(Q, SAVED, Y, T, D, qb, qt, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """Apply each query's gate to the mean value."""
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    mean = tl.load(SAVED + b * 3 * D + D + od, mask=od < D, other=0.0)
    first = c.to(tl.int64) * CHUNK
    for i in range(0, CHUNK, ROWS):
        at = (i + tl.arange(0, ROWS))[:, None]
        inside = (c * CHUNK + at < T) & (od < D)[None, :]
        y = mean[None, :] + tl.zeros([ROWS, BD], tl.float32)
        if Q is not None:
            y *= tl.sigmoid(
                tl.load(Q + b * qb + first * qt + at * qt + od[None, :], mask=inside, other=0.0).to(tl.float32)
            )
        tl.store(Y + (b * T + first + at) * D + od[None, :], y, mask=inside)


@triton.jit
def all_back_queries(
    G, Q, SAVED, PARTS, DQ, T, D, gb, gt, qb, qt, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr
):
    """Compute dq, and PARTS (B, chunks, D), the sum of g times the gate over each chunk."""
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    mean = tl.load(SAVED + b * 3 * D + D + od, mask=od < D, other=0.0)
    first, part = c.to(tl.int64) * CHUNK, tl.zeros([BD], tl.float32)
    for i in range(0, CHUNK, ROWS):
        at = (i + tl.arange(0, ROWS))[:, None]
        inside = (c * CHUNK + at < T) & (od < D)[None, :]
        g = tl.load(G + b * gb + first * gt + at * gt + od[None, :], mask=inside, other=0.0).to(tl.float32)
        if Q is not None:
            s = tl.sigmoid(
                tl.load(Q + b * qb + first * qt + at * qt + od[None, :], mask=inside, other=0.0).to(tl.float32)
            )
            g *= s
            tl.store(DQ + (b * T + first + at) * D + od[None, :], g * (1.0 - s) * mean[None, :], mask=inside)
        part += tl.sum(g, 0)
    tl.store(PARTS + (b * chunks + c) * D + od, part, mask=od < D)


@triton.jit
def all_gradients(
    K, V, MASK, SAVED, SUM, DK, DV, S, D, kb, kt, vb, vt, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr
):
    """Compute dv_s = a_s G and dk_s = a_s (v_s - mean) G, with G = SUM (B, D) and a_s = e^{k_s} / den.

    Every query sees the same mean.
    """
    b, c, chunks, od = _place(S, D, CHUNK, BD)
    m, mean, inverse = _triple(SAVED, b, 0, 1, D, od)
    total = tl.load(SUM + b * D + od, mask=od < D, other=0.0)
    first = c.to(tl.int64) * CHUNK
    for i in range(0, CHUNK, ROWS):
        t, at = c * CHUNK + i + tl.arange(0, ROWS), (i + tl.arange(0, ROWS))[:, None]
        inside = (t < S)[:, None] & (od < D)[None, :]
        at_k, at_v = b * kb + first * kt + at * kt + od[None, :], b * vb + first * vt + at * vt + od[None, :]
        k, v = _keys(K, V, at_k, at_v, _valid_tokens(MASK, b, t, S)[:, None] & (od < D)[None, :])
        dv = tl.exp(k - m[None, :]) * (inverse * total)[None, :]
        tl.store(DV + (b * S + first + at) * D + od[None, :], dv, mask=inside)
        tl.store(DK + (b * S + first + at) * D + od[None, :], dv * (v - mean[None, :]), mask=inside)


class Tile(NamedTuple):
    """Hold the rows of a tile in the totals, the outputs and the backward pass, and its width.

    They are what fits the registers of one warp.
    """

    totals: int
    outputs: int
    back: int
    width: int


WIDE, NARROW = Tile(8, 4, 8, 128), Tile(8, 8, 8, 64)
STRIP = 32  # features of a program that joins chunks: one for each thread of a warp


def tile(k: Tensor) -> Tile:
    """Return the tile for this dtype and number of features."""
    return NARROW if k.shape[-1] <= 64 else WIDE


def rows(a: Tensor) -> Tensor:
    """Return ``a`` with its last dimension contiguous, which is all the kernels require."""
    return a if a.stride(-1) == 1 or a.shape[-1] == 1 and a.is_contiguous() else a.contiguous()


def saved_shapes(
    q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, *, T: int, causal: bool
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides its inputs."""
    return [_sums_shape(k, causal)]


def _sums_shape(k: Tensor, causal: bool) -> tuple[int, ...]:
    B, S, D = k.shape
    return (B, -(-S // CHUNK), 3, D) if causal else (B, 1, 3, D)


def _grid(a: Tensor, width: int) -> tuple[int]:
    """Return the grid with one program for each chunk of time and strip of features of (B, T, D)."""
    return (a.shape[0] * -(-a.shape[1] // CHUNK) * -(-a.shape[2] // width),)


def _chunk_grid(saved: Tensor, chunks: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the constants of a kernel that walks over chunks."""
    return (-(-saved.shape[-1] // STRIP), saved.shape[0]), {"ROWS": 4 if chunks <= 4 else 16, "BD": STRIP, "warps": 1}


def _steps(a: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if a is None else a.stride()[:2]


def _empty_as(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def forward(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    T: int,
    causal: bool,
    save: bool,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D), and the tensor saved for the backward pass (empty unless ``save``).

    ``start`` (B, T) bool, in the causal form only, says where a sequence starts.
    """
    q, k, v, mask, start = None if q is None else rows(q), rows(k), rows(v), bytes_of(mask), bytes_of(start)
    (B, S, D), use = k.shape, tile(k)
    y, total, saved = (
        _empty_as(k, B, T, D),
        _empty_as(k, *_sums_shape(k, True), dtype=torch.float32),
        _empty_as(k, *_sums_shape(k, causal), dtype=torch.float32),
    )
    chunks, fixed = total.shape[1], {"CHUNK": CHUNK, "BD": use.width, "warps": 1}
    launch(
        totals, _grid(k, use.width), k, v, mask, start, total, S, D, *_steps(k), *_steps(v), ROWS=use.totals, **fixed
    )
    across, joining = _chunk_grid(saved, chunks)
    if causal:
        launch(carry, across, total, _starts_in_chunk(start, chunks), saved, chunks, D, registers=128, **joining)
        strides = (*_steps(q), *_steps(k), *_steps(v))
        launch(outputs, _grid(k, use.width), q, k, v, mask, start, saved, y, S, D, *strides, ROWS=use.outputs, **fixed)
    else:
        launch(all_join, across, total, saved, chunks, D, **joining)
        launch(all_outputs, _grid(y, use.width), q, saved, y, T, D, *_steps(q), ROWS=use.outputs, **fixed)
    return y, saved if save else saved.new_empty(0)


def _starts_in_chunk(start: Tensor | None, chunks: int) -> Tensor | None:
    """Say whether a sequence starts in a chunk: (B, chunks)."""
    if start is None:
        return None
    padded = F.pad(start, (0, chunks * CHUNK - start.shape[1]))
    return padded.unflatten(1, (chunks, CHUNK)).amax(-1)


def backward(
    g: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    saved: Tensor,
    *,
    T: int,
    causal: bool,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq (empty without q), dk, dv."""
    g, q, k, v, mask, start = rows(g), None if q is None else rows(q), rows(k), rows(v), bytes_of(mask), bytes_of(start)
    dq, dk, dv = _empty_as(k, *((0,) if q is None else q.shape)), _empty_as(k, *k.shape), _empty_as(k, *k.shape)
    (_causal_back if causal else _all_back)(g, q, k, v, mask, start, saved, dq if q is not None else None, dk, dv)
    return dq, dk, dv


def _causal_back(g, q, k, v, mask, start, saved, dq, dk, dv) -> None:
    (B, S, D), use, chunks = k.shape, tile(k), saved.shape[1]
    handed, after = _empty_as(saved, B, chunks, 3, D), _empty_as(saved, B, chunks, 2, D)
    tiles = _empty_as(saved, B, chunks * (CHUNK // use.back), 3, D)
    strides, fixed = (
        (*_steps(g), *_steps(q), *_steps(k), *_steps(v)),
        {"CHUNK": CHUNK, "ROWS": use.back, "BD": NARROW.width, "warps": 1},
    )
    launch(back_totals, _grid(k, NARROW.width), g, q, k, v, mask, start, saved, tiles, handed, S, D, *strides, **fixed)
    across, joining = _chunk_grid(saved, chunks)
    launch(back_carry, across, handed, saved, after, chunks, D, **joining)
    launch(
        gradients,
        _grid(k, NARROW.width),
        g,
        q,
        k,
        v,
        mask,
        start,
        saved,
        tiles,
        after,
        dq,
        dk,
        dv,
        S,
        D,
        *strides,
        registers=255,
        **fixed,
    )


def _all_back(g, q, k, v, mask, start, saved, dq, dk, dv) -> None:
    (B, S, D), T, use = k.shape, g.shape[1], tile(k)
    parts, fixed = (
        _empty_as(saved, B, -(-T // CHUNK), D),
        {"CHUNK": CHUNK, "ROWS": use.outputs, "BD": use.width, "warps": 1},
    )
    launch(all_back_queries, _grid(g, use.width), g, q, saved, parts, dq, T, D, *_steps(g), *_steps(q), **fixed)
    launch(
        all_gradients,
        _grid(k, use.width),
        k,
        v,
        mask,
        saved,
        parts.sum(1),
        dk,
        dv,
        S,
        D,
        *_steps(k),
        *_steps(v),
        **fixed,
    )


def starts_of(cu_seqlens: Tensor, N: int) -> Tensor:
    """Mark the first token of each packed sequence, (1, N) bool, given n + 1 borders in int32; some may be empty."""
    marks = torch.zeros(N + 1, dtype=torch.bool, device=cu_seqlens.device)
    return marks.index_fill(0, cu_seqlens.long(), True)[None, :N]


def forward_packed(q: Tensor | None, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, save: bool) -> tuple[Tensor, Tensor]:
    """Compute the causal form over packed sequences, y (N, D), from q, k, v (N, D) and cu_seqlens (n + 1) int32."""
    one = (None if q is None else q[None], k[None], v[None])
    y, saved = forward(*one, None, T=k.shape[0], causal=True, save=save, start=starts_of(cu_seqlens, k.shape[0]))
    return y[0], saved


def backward_packed(
    g: Tensor, q: Tensor | None, k: Tensor, v: Tensor, cu_seqlens: Tensor, saved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq (empty without q), dk, dv of ``forward_packed``, each (N, D)."""
    one = (g[None], None if q is None else q[None], k[None], v[None])
    dq, dk, dv = backward(*one, None, saved, T=k.shape[0], causal=True, start=starts_of(cu_seqlens, k.shape[0]))
    return dq if q is None else dq[0], dk[0], dv[0]


def samples() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls on meta tensors that reach every configuration."""
    for dtype, D, T in itertools.product((torch.float32, torch.bfloat16, torch.float16), (64, 512), (256, 4096)):
        for gate, mask, packed in ((1, 0, 0), (0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 1), (0, 0, 1)):
            x, flags = (
                torch.empty(2, T, D, dtype=dtype, device="meta"),
                torch.empty(2, T, dtype=torch.bool, device="meta"),
            )
            label = f"{str(dtype)[6:]} D={D}{' gate' * gate}{' mask' * mask}{' packed' * packed}"
            given = (x if gate else None, x, x, flags if mask else None, flags if packed else None)
            for causal in (True,) if packed else (True, False):
                yield f"{'causal ' * causal}{label}", partial(_sample, *given, causal)


def benchmark(B: int, T: int, D: int, heads: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the forms at the benchmark's shape, causal and in bfloat16, as calls on meta tensors."""
    x = torch.empty(B, T, D, dtype=torch.bfloat16, device="meta")
    yield "aft_simple", partial(_sample, x, x, x, None, None, True)


def _sample(q, k, v, mask, start, causal) -> None:
    saved = forward(q, k, v, mask, T=k.shape[1], causal=causal, save=True, start=start)[1]
    backward(k, q, k, v, mask, saved, T=k.shape[1], causal=causal, start=start)


EXCEPTIONS = dict.fromkeys(
    ("totals", "outputs", "back_totals", "gradients"),
    {"wide": "a thread owns whole columns, two features in bfloat16, so that sums along time stay in its registers"},
)
