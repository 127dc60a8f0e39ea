"""Run linear attention in Triton: y_t = sum_s w_ts v_s / sum_s w_ts with w_ts = sum_i A_ti B_si, by heads.

A and B are elu + 1 of queries and keys, or exp of them.

Each feature i of the keys has a unit e^{M_i}, where M_i is about the logarithm of the largest so far, and each query a
unit e^u that makes the largest product of its features with those about 1; both units cancel. Causal: tokens go in
chunks. One launch walks them with the matrix S = sum B v and the vector z = sum B in registers, in float64 for float32
inputs, and writes both before each chunk; the next computes the outputs: S before the chunk in the units before it,
weights within the chunk in the units of its end. If a denominator comes out below SAFE, as before a key far above all
earlier ones, the chunk is marked, and a kernel of few programs that look for marks computes the weights within it pair
by pair, as e^{a + b - u} with the sum of three rounded once and each u that of its query alone; so do those of the
backward pass. In the bidirectional form there is one S, and nothing is unsafe. Products of bfloat16 take bfloat16.

Backward, with G_t = g_t / den_t, d_t = G_t . y_t, p_ts = G_t . v_s - d_t, and R, r the sums of A G and A d over the
queries of later chunks:
    dlogA_t = A_t (S G_t - d_t z + sum_s p_ts B_s),  dlogB_s = B_s (R v_s - r + sum_t p_ts A_t),
    dv_s = R B_s + sum_t w_ts G_t,
with sums over s and t within the chunk. S is recomputed; each query's denominator and u are kept, and which chunks went
pair by pair. What a chunk passes to those before it is in the units before it, which are the largest that they have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Options
from . import INTERPRETED
from ._tiles import (
    LOOK,
    NONE,
    is_marked,
    load_marks,
    marks_grid,
    operand,
    plus,
    rows,
    span,
    strides,
    tile_of,
    valid_keys,
)
from .launch import bytes_of, launch

SEGMENT = 512  # tokens of the bidirectional form that are summed in one program
SAFE = tl.constexpr(1e-12)  # a denominator below this may have lost terms to underflow
BFLOAT = tl.constexpr(not INTERPRETED)  # the interpreter multiplies the same numbers in float32


@triton.jit
def _parts(x, ELU: tl.constexpr):
    """Split a feature into e^arg times a factor, and return about its logarithm too."""
    arg, factor, level = x, 1.0, x
    if ELU:
        factor = 1.0 + tl.maximum(x, 0.0)
        arg, level = tl.minimum(x, 0.0), tl.where(x > 0, tl.log(factor), x)
    return arg, factor, level


@triton.jit
def _key(x, m, live, ELU: tl.constexpr):
    """Compute the features of keys (rows) in the units m; 0 where a key is masked."""
    arg, factor, _ = _parts(x, ELU)
    return tl.where(live[:, None], tl.exp(tl.minimum(arg - m[None, :], 1.0)) * factor, 0.0)


@triton.jit
def _query(x, m, u, ELU: tl.constexpr):
    """Compute the features of queries (rows) times e^m, over their units u."""
    arg, factor, _ = _parts(x, ELU)
    return tl.exp(tl.minimum(plus(arg, m[None, :], u[:, None], False), 1.0)) * factor


@triton.jit
def _pair(q, k, u, ELU: tl.constexpr):
    """Compute the products of the features of one query (1, i) and of keys (s, i), over e^u."""
    a, fa, _ = _parts(q, ELU)
    b, fb, _ = _parts(k, ELU)
    return tl.exp(tl.minimum(plus(a, b, u, False), 1.0)) * fa * fb


@triton.jit
def _chain(x, d, ELU: tl.constexpr):
    """Compute d / dx from d / d log(feature)."""
    if ELU:
        d = tl.where(x > 0, d / (1.0 + tl.maximum(x, 0.0)), d)
    return d


@triton.jit
def _dot(a, b, add, DROP: tl.constexpr):
    """Compute a b + add; with DROP, on tensor cores that ignore DROP bits of the operands, rounded to nearest."""
    if DROP == 16 and BFLOAT:
        y = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), add)
    elif DROP:
        y = tl.dot(operand(a, a, DROP), operand(b, b, DROP), add, input_precision="tf32")
    else:
        y = tl.dot(a, b, add, input_precision="ieee")
    return y


@triton.jit
def _place(i, H, n, tiles):
    """Return what number i stands for: row of the batch, head, both as one number, chunk or segment of n, and tile."""
    lead = (i // tiles // n).to(tl.int64)
    return lead // H, lead % H, lead, i // tiles % n, i % tiles


@triton.jit
def _chunk(i, H, n, e, L: tl.constexpr, B: tl.constexpr):
    """Return ``_place``, rows within the chunk, features, tokens and the first token.

    They belong to number i of those that work on one of n chunks and B of its features.
    """
    b, h, lead, c, tile = _place(i, H, n, tl.cdiv(e, B))
    rows = tl.arange(0, L)
    return b, h, lead, c, tile, rows, tile * B + tl.arange(0, B), c * L + rows, c.to(tl.int64) * L


@triton.jit
def _sums(lead, n, c, AFTER: tl.constexpr, CAUSAL: tl.constexpr):
    """Return which sums a chunk takes and whose units: those at its start or, with AFTER, at its end.

    In the bidirectional form there is one of each.
    """
    at, top = lead, lead
    if CAUSAL:
        at, top = lead * n + c, lead * n + lead + c + AFTER
    return at, top


@triton.jit
def _tile(X, t, x_t, i, ok, e):
    """Load rows t and columns i of X in float32; zeros where not ok and from column e on."""
    return tl.load(X + t[:, None] * x_t + i[None, :], mask=ok[:, None] & (i < e)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _matrix(S, i, j, e):
    inside = (i < e)[:, None] & (j < e)[None, :]
    return tl.load(S + i[:, None] * e + j[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _vector(Z, i, e, other):
    return tl.load(Z + i, mask=i < e, other=other)


@triton.jit
def _pick(x, rows, r):
    """Return element r of x."""
    return tl.sum(tl.where(rows == r, x, 0.0), 0)


@triton.jit
def totals(
    K, V, MASK, TOP, S, Z, T, H, e, n, kb, kt, vb, vt, ELU: tl.constexpr, DROP: tl.constexpr, SIZE: tl.constexpr,
    L: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Compute TOP (B, H, n, e), the largest logarithm of a feature, for n segments of SIZE keys.

    Also compute the sums S (B, H, n, e, e) and Z (B, H, n, e) in units of e^TOP.
    """
    tj = tl.cdiv(e, BJ)
    b, h, lead, c, tile = _place(tl.program_id(0), H, n, tl.cdiv(e, BI) * tj)
    i, j = tile // tj * BI + tl.arange(0, BI), tile % tj * BJ + tl.arange(0, BJ)
    K += b * kb + h * e
    V += b * vb + h * e
    m, s, z = tl.full([BI], NONE, tl.float32), tl.zeros([BI, BJ], tl.float32), tl.zeros([BI], tl.float32)
    for start in span(c * SIZE, tl.minimum(c * SIZE + SIZE, T), L):
        t = start + tl.arange(0, L)
        live = valid_keys(MASK, b, t, T)
        x, v = _tile(K, t.to(tl.int64), kt, i, live, e), _tile(V, t.to(tl.int64), vt, j, live, e)
        _, _, level = _parts(x, ELU)
        top = tl.maximum(m, tl.max(tl.where(live[:, None], level, NONE), 0))
        old = tl.exp(m - top)
        k = _key(x, top, live, ELU)
        s = _dot(tl.trans(k), v, s * old[:, None], DROP)
        z, m = z * old + tl.sum(k, 0), top
    at = lead * n + c
    tl.store(S + at * e * e + i[:, None] * e + j[None, :], s, mask=(i < e)[:, None] & (j < e)[None, :])
    tl.store(Z + at * e + i, z, mask=i < tl.where(tile % tj == 0, e, 0))
    tl.store(TOP + at * e + i, m, mask=i < tl.where(tile % tj == 0, e, 0))


@triton.jit
def join(TOP, S, Z, TOPS, ALL, ZS, e, n, BI: tl.constexpr, BJ: tl.constexpr):
    """Sum all segments, in units TOPS (B, H, 1, e)."""
    tj = tl.cdiv(e, BJ)
    _, _, lead, _, tile = _place(tl.program_id(0), 1, 1, tl.cdiv(e, BI) * tj)
    i, j = tile // tj * BI + tl.arange(0, BI), tile % tj * BJ + tl.arange(0, BJ)
    inside, own = (i < e)[:, None] & (j < e)[None, :], i < tl.where(tile % tj == 0, e, 0)
    p = i[:, None] * e + j[None, :]
    m, s, z = tl.full([BI], NONE, tl.float32), tl.zeros([BI, BJ], tl.float64), tl.zeros([BI], tl.float64)
    for c in span(n):
        at = lead * n + c
        new = _vector(TOP + at * e, i, e, NONE)
        top = tl.maximum(m, new)
        old, add = tl.exp(m - top).to(tl.float64), tl.exp(new - top).to(tl.float64)
        s = s * old[:, None] + tl.load(S + at * e * e + p, mask=inside, other=0.0).to(tl.float64) * add[:, None]
        z, m = z * old + _vector(Z + at * e, i, e, 0.0).to(tl.float64) * add, top
    tl.store(ALL + lead * e * e + p, s.to(tl.float32), mask=inside)
    tl.store(ZS + lead * e + i, z.to(tl.float32), mask=own)
    tl.store(TOPS + lead * e + i, m, mask=own)


@triton.jit
def states(
    K, V, MASK, TOPS, S, Z, T, H, e, n, kb, kt, vb, vt,
    ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Walk n chunks of L keys: the sums S (B, H, n, e, e) and Z (B, H, n, e) before each, in units of e^TOPS.

    TOPS (B, H, n + 1, e) is the largest logarithm of a feature before each chunk and after the last.
    """
    tj = tl.cdiv(e, BJ)
    b, h, lead, _c, tile = _place(tl.program_id(0), H, 1, tl.cdiv(e, BI) * tj)
    i, j = tile // tj * BI + tl.arange(0, BI), tile % tj * BJ + tl.arange(0, BJ)
    K += b * kb + h * e
    V += b * vb + h * e
    inside, own = (i < e)[:, None] & (j < e)[None, :], i < tl.where(tile % tj == 0, e, 0)
    m = tl.full([BI], NONE, tl.float32)
    if DROP:
        s, z = tl.zeros([BI, BJ], tl.float32), tl.zeros([BI], tl.float32)
    else:
        s, z = tl.zeros([BI, BJ], tl.float64), tl.zeros([BI], tl.float64)
    for c in span(n):
        at = lead * n + c
        tl.store(S + at * e * e + i[:, None] * e + j[None, :], s, mask=inside)
        tl.store(Z + at * e + i, z, mask=own)
        tl.store(TOPS + (at + lead) * e + i, m, mask=own)
        t = c * L + tl.arange(0, L)
        live = valid_keys(MASK, b, t, T)
        x, v = _tile(K, t.to(tl.int64), kt, i, live, e), _tile(V, t.to(tl.int64), vt, j, live, e)
        _arg, _factor, level = _parts(x, ELU)
        top = tl.maximum(m, tl.max(tl.where(live[:, None], level, NONE), 0))
        k, old = _key(x, top, live, ELU), tl.exp(m - top).to(s.dtype)
        s = s * old[:, None] + _dot(tl.trans(k), v, tl.zeros([BI, BJ], tl.float32), DROP).to(s.dtype)
        z, m = z * old + tl.sum(k, 0).to(s.dtype), top
    tl.store(TOPS + (lead * n + lead + n) * e + i, m, mask=own)


@triton.jit
def _chunk_weights(
    Q,
    K,
    MEND,
    MOLD,
    Z,
    live,
    t,
    T,
    e,
    qt,
    kt,
    rows,
    ELU: tl.constexpr,
    DROP: tl.constexpr,
    L: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute units of a chunk's queries and weights within it, with all keys in the units of its end.

    Also say whether a denominator that sums something is below SAFE.
    """
    u, some = tl.full([L], NONE, tl.float32), tl.full([BK], NONE, tl.float32)
    for i0 in span(0, e, BK):
        i = i0 + tl.arange(0, BK)
        _, _, level = _parts(_tile(Q, rows, qt, i, t < T, e), ELU)
        u = tl.maximum(u, tl.max(level + _vector(MEND, i, e, NONE)[None, :], 1))
        some = tl.maximum(some, _vector(MOLD, i, e, NONE))
    u = tl.maximum(u, NONE)
    w, den = tl.zeros([L, L], tl.float32), tl.zeros([L], tl.float32)
    for i0 in span(0, e, BK):
        i = i0 + tl.arange(0, BK)
        end, old = _vector(MEND, i, e, NONE), _vector(MOLD, i, e, NONE)
        q = tl.where((i < e)[None, :], _query(_tile(Q, rows, qt, i, t < T, e), end, u, ELU), 0.0)
        k = _key(_tile(K, rows, kt, i, live, e), end, live, ELU)
        w = _dot(q, tl.trans(k), w, DROP)
        den += tl.sum(q * (tl.exp(old - end) * _vector(Z, i, e, 0.0))[None, :], 1)
    w = tl.where(rows[:, None] >= rows[None, :], w, 0.0)
    first = tl.where(
        tl.max(some, 0) > NONE, 0, tl.min(tl.where(live, rows, L), 0)
    )  # the first query that sees something
    unsafe = (den + tl.sum(w, 1) < SAFE) & (rows >= first) & (t < T)
    return u, w, tl.max(unsafe.to(tl.int32), 0)


@triton.jit
def _load_row(X, r, x_t, i, e):
    """Load row r of X, (1, i), in float32; zeros from column e on."""
    return tl.load(X + r * x_t + i, mask=i < e, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _own_units(Q, K, MOLD, live, left, e, qt, kt, rows, ELU: tl.constexpr, L: tl.constexpr, BK: tl.constexpr):
    """Compute the units of a chunk's queries, each from the keys it sees."""
    u = tl.full([L], NONE, tl.float32)
    for i0 in span(0, e, BK):
        i = i0 + tl.arange(0, BK)
        m = _vector(MOLD, i, e, NONE)[None, :]
        for r in span(tl.minimum(left, L)):
            width = tl.where(tl.sum(tl.where(rows == r, live.to(tl.int32), 0), 0) != 0, e, 0)
            _, _, key = _parts(_load_row(K, r, kt, i, width), ELU)
            _, _, query = _parts(_load_row(Q, r, qt, i, e), ELU)
            m = tl.maximum(m, tl.where((i < width)[None, :], key, NONE))
            u = tl.where(rows == r, tl.maximum(u, tl.max(query + m, 1)), u)
    return u


@triton.jit
def _weights(Q, K, u, live, left, e, qt, kt, rows, ELU: tl.constexpr, L: tl.constexpr, BK: tl.constexpr):
    """Compute the weights within a chunk, pair by pair."""
    w = tl.zeros([L, L], tl.float32)
    for i0 in span(0, e, BK):
        i = i0 + tl.arange(0, BK)
        k = _tile(K, rows, kt, i, live, e)
        for r in span(tl.minimum(left, L)):
            pair = _pair(_load_row(Q, r, qt, i, e), k, _pick(u, rows, r), ELU)
            w += tl.where(rows[:, None] == r, tl.sum(tl.where((i < e)[None, :], pair, 0.0), 1)[None, :], 0.0)
    return tl.where(live[None, :] & (rows[:, None] >= rows[None, :]), w, 0.0)


@triton.jit
def outputs(
    Q, K, V, MASK, TOPS, S, Z, Y, DEN, UNIT, SLOW, T, H, e, n, qb, qt, kb, kt, vb, vt,
    CAUSAL: tl.constexpr, ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Compute y, denominators and units of a chunk of queries, and mark chunks that must go pair by pair."""
    _outputs(
        tl.program_id(0), Q, K, V, MASK, TOPS, S, Z, Y, DEN, UNIT, SLOW, T, H, e, n, qb, qt, kb, kt, vb, vt,
        CAUSAL, False, ELU, DROP, L, BK, BJ,
    )  # fmt: skip


@triton.jit
def outputs_exact(
    Q, K, V, MASK, TOPS, S, Z, Y, DEN, UNIT, FLAG, T, H, e, n, total, qb, qt, kb, kt, vb, vt,
    ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, TILES: tl.constexpr,
    LOOK: tl.constexpr,
):  # fmt: skip
    """Look for marked chunks, and compute the same of them pair by pair."""
    for start in span(0, total, tl.num_programs(0) * LOOK):
        marks = load_marks(FLAG, start, total, TILES, LOOK)
        for one in span(tl.where(tl.max(marks, 0) != 0, LOOK, 0)):
            if is_marked(marks, one, LOOK):
                _outputs(
                    tile_of(start, one), Q, K, V, MASK, TOPS, S, Z, Y, DEN, UNIT, FLAG, T, H, e, n,
                    qb, qt, kb, kt, vb, vt, True, True, ELU, DROP, L, BK, BJ,
                )  # fmt: skip


@triton.jit
def _outputs(
    number, Q, K, V, MASK, TOPS, S, Z, Y, DEN, UNIT, SLOW, T, H, e, n, qb, qt, kb, kt, vb, vt,
    CAUSAL: tl.constexpr, EXACT: tl.constexpr, ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr,
    BK: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Compute what ``outputs`` says for one number."""
    b, h, lead, c, tile, rows, j, t, first = _chunk(number, H, n, e, L, BJ)
    at, top = _sums(lead, n, c, 0, CAUSAL)
    S += at * e * e
    Z += at * e
    TOPS += top * e
    Q += b * qb + first * qt + h * e
    u, den, o = tl.full([L], NONE, tl.float32), tl.zeros([L], tl.float32), tl.zeros([L, BJ], tl.float32)
    if CAUSAL:
        K += b * kb + first * kt + h * e
        V += b * vb + first * vt + h * e
        live = valid_keys(MASK, b, t, T)
        if EXACT:
            u = _own_units(Q, K, TOPS, live, T - c * L, e, qt, kt, rows, ELU, L, BK)
            w = _weights(Q, K, u, live, T - c * L, e, qt, kt, rows, ELU, L, BK)
        else:
            u, w, slow = _chunk_weights(Q, K, TOPS + e, TOPS, Z, live, t, T, e, qt, kt, rows, ELU, DROP, L, BK)
            tl.store(SLOW + lead * n + c, slow, mask=tile == 0)
        o = _dot(w, _tile(V, rows, vt, j, live, e), o, DROP)
        den = tl.sum(w, 1)
    else:
        for i0 in span(0, e, BK):
            i = i0 + tl.arange(0, BK)
            _, _, level = _parts(_tile(Q, rows, qt, i, t < T, e), ELU)
            u = tl.maximum(u, tl.max(level + _vector(TOPS, i, e, NONE)[None, :], 1))
    for i0 in span(0, e, BK):
        i = i0 + tl.arange(0, BK)
        q = tl.where((i < e)[None, :], _query(_tile(Q, rows, qt, i, t < T, e), _vector(TOPS, i, e, NONE), u, ELU), 0.0)
        o = _dot(q, _matrix(S, i, j, e), o, DROP)
        den += tl.sum(q * _vector(Z, i, e, 0.0)[None, :], 1)
    y = o / tl.where(den > 0, den, 1.0)[:, None]
    tl.store(
        Y + ((b * T + first + rows) * H + h)[:, None] * e + j[None, :], y, mask=(t < T)[:, None] & (j < e)[None, :]
    )
    tl.store(DEN + lead * T + t, den, mask=t < tl.where(tile == 0, T, 0))
    tl.store(UNIT + lead * T + t, u, mask=t < tl.where(tile == 0, T, 0))


@triton.jit
def _inverse(DEN, t, T):
    """Compute 1 / denominator of queries, 0 for those that see nothing."""
    den = tl.load(DEN + t, mask=t < T, other=0.0)
    return tl.where(den > 0, 1.0 / tl.where(den > 0, den, 1.0), 0.0)


@triton.jit
def dots(G, Y, DEN, DOT, T, H, e, n, gb, gt, L: tl.constexpr, BK: tl.constexpr):
    """Compute DOT (B, H, T), g . y / denominator."""
    b, h, lead, c, _ = _place(tl.program_id(0), H, n, 1)
    t = c * L + tl.arange(0, L)
    far, d = t.to(tl.int64), tl.zeros([L], tl.float32)
    for j0 in span(0, e, BK):
        j = j0 + tl.arange(0, BK)
        d += tl.sum(
            _tile(G + b * gb + h * e, far, gt, j, t < T, e) * _tile(Y + b * T * H * e + h * e, far, H * e, j, t < T, e),
            1,
        )
    tl.store(DOT + lead * T + t, d * _inverse(DEN + lead * T, t, T), mask=t < T)


@triton.jit
def _query_terms(
    G, Q, DEN, UNIT, DOT, m, t, T, i, j, e, gt, qt, r, z, ELU: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Add to r and z the sums of A G and A d over the queries t, in units m."""
    u, d = tl.load(UNIT + t, mask=t < T, other=0.0), tl.load(DOT + t, mask=t < T, other=0.0)
    q = _query(_tile(Q, t.to(tl.int64), qt, i, t < T, e), m, u, ELU)
    g = _tile(G, t.to(tl.int64), gt, j, t < T, e) * _inverse(DEN, t, T)[:, None]
    return _dot(tl.trans(q), g, r, DROP), z + tl.sum(q * d[:, None], 0)


@triton.jit
def back_totals(
    G, Q, TOPS, DEN, UNIT, DOT, R, ZR, T, H, e, n, gb, gt, qb, qt,
    ELU: tl.constexpr, DROP: tl.constexpr, SIZE: tl.constexpr, L: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Compute R (B, H, n, e, e) and ZR (B, H, n, e), the sums of A G and A d over segments, in units of all keys."""
    tj = tl.cdiv(e, BJ)
    b, h, lead, c, tile = _place(tl.program_id(0), H, n, tl.cdiv(e, BI) * tj)
    i, j = tile // tj * BI + tl.arange(0, BI), tile % tj * BJ + tl.arange(0, BJ)
    G += b * gb + h * e
    Q += b * qb + h * e
    m = _vector(TOPS + lead * e, i, e, NONE)
    r, z = tl.zeros([BI, BJ], tl.float32), tl.zeros([BI], tl.float32)
    for start in span(c * SIZE, tl.minimum(c * SIZE + SIZE, T), L):
        t = start + tl.arange(0, L)
        of = lead * T
        r, z = _query_terms(G, Q, DEN + of, UNIT + of, DOT + of, m, t, T, i, j, e, gt, qt, r, z, ELU, DROP)
    at = lead * n + c
    tl.store(R + at * e * e + i[:, None] * e + j[None, :], r, mask=(i < e)[:, None] & (j < e)[None, :])
    tl.store(ZR + at * e + i, z, mask=i < tl.where(tile % tj == 0, e, 0))


@triton.jit
def back_states(
    G, Q, TOPS, DEN, UNIT, DOT, R, ZR, T, H, e, n, gb, gt, qb, qt,
    ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Walk the chunks from the last: R (B, H, n, e, e) and ZR (B, H, n, e), the sums after each, in its end's units."""
    tj = tl.cdiv(e, BJ)
    b, h, lead, _, tile = _place(tl.program_id(0), H, 1, tl.cdiv(e, BI) * tj)
    i, j = tile // tj * BI + tl.arange(0, BI), tile % tj * BJ + tl.arange(0, BJ)
    G += b * gb + h * e
    Q += b * qb + h * e
    inside, own = (i < e)[:, None] & (j < e)[None, :], i < tl.where(tile % tj == 0, e, 0)
    if DROP:
        s, z = tl.zeros([BI, BJ], tl.float32), tl.zeros([BI], tl.float32)
    else:
        s, z = tl.zeros([BI, BJ], tl.float64), tl.zeros([BI], tl.float64)
    end = _vector(TOPS + (lead * n + lead + n) * e, i, e, NONE)
    for back in span(n):
        c = n - 1 - back
        at = lead * n + c
        tl.store(R + at * e * e + i[:, None] * e + j[None, :], s, mask=inside)
        tl.store(ZR + at * e + i, z, mask=own)
        m, of = _vector(TOPS + (at + lead) * e, i, e, NONE), lead * T
        r, d = tl.zeros([BI, BJ], tl.float32), tl.zeros([BI], tl.float32)
        t = c * L + tl.arange(0, L)
        r, d = _query_terms(G, Q, DEN + of, UNIT + of, DOT + of, m, t, T, i, j, e, gt, qt, r, d, ELU, DROP)
        fall = tl.exp(m - end).to(s.dtype)
        s, z, end = s * fall[:, None] + r.to(s.dtype), z * fall + d.to(s.dtype), m


@triton.jit
def back_queries(
    G, Q, K, V, MASK, TOPS, S, Z, DEN, UNIT, DOT, DQ, T, H, e, n, gb, gt, qb, qt, kb, kt, vb, vt,
    CAUSAL: tl.constexpr, ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Compute dq of a chunk."""
    _back_queries(
        tl.program_id(0), G, Q, K, V, MASK, TOPS, S, Z, DEN, UNIT, DOT, DQ, T, H, e, n, gb, gt, qb, qt, kb, kt, vb,
        vt, CAUSAL, False, ELU, DROP, L, BK, BI,
    )  # fmt: skip


@triton.jit
def _back_queries(
    number, G, Q, K, V, MASK, TOPS, S, Z, DEN, UNIT, DOT, DQ, T, H, e, n, gb, gt, qb, qt, kb, kt, vb, vt,
    CAUSAL: tl.constexpr, EXACT: tl.constexpr, ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr,
    BK: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Compute dq for one number."""
    b, h, lead, c, _, rows, i, t, first = _chunk(number, H, n, e, L, BI)
    at, top = _sums(lead, n, c, 0, CAUSAL)
    S += at * e * e
    Z += at * e
    TOPS += top * e
    G += b * gb + first * gt + h * e
    Q += b * qb + first * qt + h * e
    inverse = _inverse(DEN + lead * T, t, T)
    u, d = tl.load(UNIT + lead * T + t, mask=t < T, other=0.0), tl.load(DOT + lead * T + t, mask=t < T, other=0.0)
    if CAUSAL:
        K += b * kb + first * kt + h * e
        V += b * vb + first * vt + h * e
        live = valid_keys(MASK, b, t, T)
    o, p = tl.zeros([L, BI], tl.float32), tl.zeros([L, L], tl.float32)
    for j0 in span(0, e, BK):
        j = j0 + tl.arange(0, BK)
        g = _tile(G, rows, gt, j, t < T, e) * inverse[:, None]
        o = _dot(g, tl.trans(_matrix(S, i, j, e)), o, DROP)
        if CAUSAL:
            p = _dot(g, tl.trans(_tile(V, rows, vt, j, live, e)), p, DROP)
    x = _tile(Q, rows, qt, i, t < T, e)
    o = (o - d[:, None] * _vector(Z, i, e, 0.0)[None, :]) * _query(x, _vector(TOPS, i, e, NONE), u, ELU)
    if CAUSAL:
        p = tl.where(live[None, :] & (rows[:, None] >= rows[None, :]), p - d[:, None], 0.0)
        k = _tile(K, rows, kt, i, live, e)
        if EXACT:
            for r in span(tl.minimum(T - c * L, L)):
                pair = _pair(_load_row(Q, r, qt, i, e), k, _pick(u, rows, r), ELU)
                own = tl.sum(tl.where(rows[:, None] == r, p, 0.0), 0)
                o += tl.where(rows[:, None] == r, tl.sum(own[:, None] * pair, 0)[None, :], 0.0)
        else:
            end = _vector(TOPS + e, i, e, NONE)
            o += _dot(p, _key(k, end, live, ELU), tl.zeros_like(o), DROP) * _query(x, end, u, ELU)
    tl.store(
        DQ + ((b * T + first + rows) * H + h)[:, None] * e + i[None, :],
        _chain(x, o, ELU),
        mask=(t < T)[:, None] & (i < e)[None, :],
    )


@triton.jit
def back_keys(
    G, Q, K, V, MASK, TOPS, R, ZR, DEN, UNIT, DOT, DK, T, H, e, n, gb, gt, qb, qt, kb, kt, vb, vt,
    CAUSAL: tl.constexpr, ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Compute dk of a chunk."""
    _back_keys(
        tl.program_id(0), G, Q, K, V, MASK, TOPS, R, ZR, DEN, UNIT, DOT, DK, T, H, e, n, gb, gt, qb, qt, kb, kt, vb,
        vt, CAUSAL, False, ELU, DROP, L, BK, BI,
    )  # fmt: skip


@triton.jit
def back_exact(
    G, Q, K, V, MASK, TOPS, S, Z, DEN, UNIT, DOT, FLAG, OUT, T, H, e, n, total, gb, gt, qb, qt, kb, kt, vb, vt,
    KEYS: tl.constexpr, ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr,
    TILES: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Look for marked chunks, and compute dk, or dq, of them pair by pair."""
    for start in span(0, total, tl.num_programs(0) * LOOK):
        marks = load_marks(FLAG, start, total, TILES, LOOK)
        for one in span(tl.where(tl.max(marks, 0) != 0, LOOK, 0)):
            if is_marked(marks, one, LOOK):
                if KEYS:
                    _back_keys(
                        tile_of(start, one), G, Q, K, V, MASK, TOPS, S, Z, DEN, UNIT, DOT, OUT, T, H, e, n, gb, gt,
                        qb, qt, kb, kt, vb, vt, True, True, ELU, DROP, L, BK, BI,
                    )  # fmt: skip
                else:
                    _back_queries(
                        tile_of(start, one), G, Q, K, V, MASK, TOPS, S, Z, DEN, UNIT, DOT, OUT, T, H, e, n, gb, gt,
                        qb, qt, kb, kt, vb, vt, True, True, ELU, DROP, L, BK, BI,
                    )  # fmt: skip


@triton.jit
def _back_keys(
    number, G, Q, K, V, MASK, TOPS, R, ZR, DEN, UNIT, DOT, DK, T, H, e, n, gb, gt, qb, qt, kb, kt, vb, vt,
    CAUSAL: tl.constexpr, EXACT: tl.constexpr, ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr,
    BK: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Compute dk for one number."""
    b, h, lead, c, _, rows, i, t, first = _chunk(number, H, n, e, L, BI)
    at, top = _sums(lead, n, c, 1, CAUSAL)
    R += at * e * e
    ZR += at * e
    TOPS += top * e
    K += b * kb + first * kt + h * e
    V += b * vb + first * vt + h * e
    live = valid_keys(MASK, b, t, T)
    if CAUSAL:
        G += b * gb + first * gt + h * e
        Q += b * qb + first * qt + h * e
        inverse = _inverse(DEN + lead * T, t, T)
    o, p = tl.zeros([L, BI], tl.float32), tl.zeros([L, L], tl.float32)
    for j0 in span(0, e, BK):
        j = j0 + tl.arange(0, BK)
        v = _tile(V, rows, vt, j, live, e)
        o = _dot(v, tl.trans(_matrix(R, i, j, e)), o, DROP)
        if CAUSAL:
            g = _tile(G, rows, gt, j, t < T, e) * inverse[:, None]
            p = _dot(v, tl.trans(g), p, DROP)
    x, m = _tile(K, rows, kt, i, live, e), _vector(TOPS, i, e, NONE)
    o = (o - _vector(ZR, i, e, 0.0)[None, :]) * _key(x, m, live, ELU)
    if CAUSAL:
        u, d = tl.load(UNIT + lead * T + t, mask=t < T, other=0.0), tl.load(DOT + lead * T + t, mask=t < T, other=0.0)
        p = tl.where(live[:, None] & (rows[:, None] <= rows[None, :]), p - d[None, :], 0.0)
        if EXACT:
            for r in span(tl.minimum(T - c * L, L)):
                pair = _pair(_load_row(Q, r, qt, i, e), x, _pick(u, rows, r), ELU)
                o += tl.sum(tl.where(rows[None, :] == r, p, 0.0), 1)[:, None] * pair
        else:
            q = _query(_tile(Q, rows, qt, i, t < T, e), m, u, ELU)
            o += _dot(p, q, tl.zeros_like(o), DROP) * _key(x, m, live, ELU)
    o = tl.where(live[:, None], _chain(x, o, ELU), 0.0)
    tl.store(
        DK + ((b * T + first + rows) * H + h)[:, None] * e + i[None, :], o, mask=(t < T)[:, None] & (i < e)[None, :]
    )


@triton.jit
def back_values(
    G, Q, K, MASK, TOPS, R, DEN, UNIT, DV, T, H, e, n, gb, gt, qb, qt, kb, kt,
    CAUSAL: tl.constexpr, ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Compute dv of a chunk."""
    _back_values(
        tl.program_id(0), G, Q, K, MASK, TOPS, R, DEN, UNIT, DV, T, H, e, n, gb, gt, qb, qt, kb, kt, CAUSAL, False,
        ELU, DROP, L, BK, BJ,
    )  # fmt: skip


@triton.jit
def back_values_exact(
    G, Q, K, MASK, TOPS, R, DEN, UNIT, FLAG, DV, T, H, e, n, total, gb, gt, qb, qt, kb, kt,
    ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, TILES: tl.constexpr,
    LOOK: tl.constexpr,
):  # fmt: skip
    """Look for marked chunks, and compute dv of them pair by pair."""
    for start in span(0, total, tl.num_programs(0) * LOOK):
        marks = load_marks(FLAG, start, total, TILES, LOOK)
        for one in span(tl.where(tl.max(marks, 0) != 0, LOOK, 0)):
            if is_marked(marks, one, LOOK):
                _back_values(
                    tile_of(start, one), G, Q, K, MASK, TOPS, R, DEN, UNIT, DV, T, H, e, n, gb, gt, qb, qt, kb, kt,
                    True, True, ELU, DROP, L, BK, BJ,
                )  # fmt: skip


@triton.jit
def _back_values(
    number, G, Q, K, MASK, TOPS, R, DEN, UNIT, DV, T, H, e, n, gb, gt, qb, qt, kb, kt, CAUSAL: tl.constexpr,
    EXACT: tl.constexpr, ELU: tl.constexpr, DROP: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Compute dv for one number."""
    b, h, lead, c, _, rows, j, t, first = _chunk(number, H, n, e, L, BJ)
    at, top = _sums(lead, n, c, 1, CAUSAL)
    R += at * e * e
    TOPS += top * e
    K += b * kb + first * kt + h * e
    live = valid_keys(MASK, b, t, T)
    if CAUSAL:
        Q += b * qb + first * qt + h * e
        u = tl.load(UNIT + lead * T + t, mask=t < T, other=0.0)
    o, w = tl.zeros([L, BJ], tl.float32), tl.zeros([L, L], tl.float32)
    for i0 in span(0, e, BK):
        i = i0 + tl.arange(0, BK)
        m = _vector(TOPS, i, e, NONE)
        k = tl.where((i < e)[None, :], _key(_tile(K, rows, kt, i, live, e), m, live, ELU), 0.0)
        o = _dot(k, _matrix(R, i, j, e), o, DROP)
        if CAUSAL:
            q = tl.where((i < e)[None, :], _query(_tile(Q, rows, qt, i, t < T, e), m, u, ELU), 0.0)
            w = _dot(q, tl.trans(k), w, DROP)
    if CAUSAL:
        w = tl.where(rows[:, None] >= rows[None, :], w, 0.0)
        if EXACT:
            w = _weights(Q, K, u, live, T - c * L, e, qt, kt, rows, ELU, L, BK)
        g = _tile(G + b * gb + first * gt + h * e, rows, gt, j, t < T, e) * _inverse(DEN + lead * T, t, T)[:, None]
        o = _dot(tl.trans(w), g, o, DROP)
    tl.store(
        DV + ((b * T + first + rows) * H + h)[:, None] * e + j[None, :], o, mask=(t < T)[:, None] & (j < e)[None, :]
    )


class Cut(NamedTuple):
    """Hold the sizes by which the work is cut."""

    chunk: int  # tokens of the causal form that share their units, and of a program
    wide: int  # features of a program's outputs and gradients
    step: int  # the contracted features of one step, or tokens where those are contracted
    warps: int
    drop: int  # bits of a float32 that a product ignores
    stages: int  # loads ahead of a step; they cost registers
    kept: torch.dtype  # of the sums before and after each chunk


CUTS = {
    torch.float32: Cut(64, 16, 16, 8, 0, 1, torch.float32),
    torch.bfloat16: Cut(64, 64, 32, 8, 16, 2, torch.bfloat16),
    torch.float16: Cut(64, 32, 32, 8, 13, 2, torch.float32),
}
STATE = {"BI": 64, "BJ": 16}  # features of keys and of values of a program that walks the chunks or sums a segment
EXACT = 32  # features of a program's outputs and gradients that go pair by pair
STRIP = {"BI": 16, "BJ": 32, "warps": 1}  # of a program that joins segments


def cut(q: Tensor) -> Cut:
    """Return the sizes for this dtype."""
    return CUTS[q.dtype]


def _saved_shape(q: Tensor, heads: int, causal: bool) -> tuple[int, ...]:
    """Return the shape of denominators and units, and causal also which chunks went pair by pair."""
    B, T = q.shape[:2]
    return B, heads, 2 * T + (-(-T // cut(q).chunk) if causal else 0)


def _empty_float32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


class _Call:
    """Hold the sizes of one call, and make the launches that both passes share."""

    def __init__(self, q: Tensor, k: Tensor, heads: int, elu: bool, causal: bool):
        self.use, self.causal = cut(q), causal
        (self.B, self.T, D), self.S, self.H = q.shape, k.shape[1], heads
        self.e, self.lead = D // heads, self.B * heads
        self.size = self.use.chunk if causal else SEGMENT
        self.wide = self.at_most(self.use.wide)
        self.tiles = -(-self.e // self.wide)
        self.states = -(-self.e // STATE["BI"]) * -(-self.e // STATE["BJ"])
        self.fixed = {
            "DROP": self.use.drop,
            "ELU": elu,
            "L": self.use.chunk,
            "warps": self.use.warps,
            "stages": self.use.stages,
        }
        self.walk = {**self.fixed, **STATE}
        self.summed = {**self.walk, "L": self.use.step, "SIZE": self.size}

    def at_most(self, features: int) -> int:
        """Return how many features a program takes: no more than a head has, rounded up to a power of two."""
        return min(features, max(32, 1 << (self.e - 1).bit_length()))

    def chunks(self, T: int) -> int:
        return -(-T // self.use.chunk)

    def sums(self, like: Tensor, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Allocate a matrix and a vector for each of n segments."""
        matrix = torch.empty(self.B, self.H, n, self.e, self.e, dtype=dtype, device=like.device)
        return matrix, _empty_float32(like, self.B, self.H, n, self.e)

    def split(self, saved: Tensor) -> tuple[Tensor, ...]:
        """Return denominators, units, and which chunks went pair by pair."""
        size = self.lead * self.T
        flat = saved.reshape(-1)
        return flat[:size], flat[size : 2 * size], flat[2 * size :]

    def sums_before(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute units, and the sums before each chunk; or those over all keys."""
        n = -(-self.S // self.size)
        sizes = (self.S, self.H, self.e, n, *strides(k), *strides(v))
        flops = 2.0 * self.B * self.S * self.H * self.e**2
        if self.causal:
            tops, (S, Z) = _empty_float32(k, self.B, self.H, n + 1, self.e), self.sums(k, n, self.use.kept)
            grid = (self.lead * self.states,)
            launch(states, grid, k, v, mask, tops, S, Z, *sizes, flops=flops, **self.walk)
            return tops, S, Z
        top, (S, Z) = _empty_float32(k, self.B, self.H, n, self.e), self.sums(k, n)
        launch(totals, (self.lead * n * self.states,), k, v, mask, top, S, Z, *sizes, flops=flops, **self.summed)
        tops, joined = _empty_float32(k, self.B, self.H, 1, self.e), self.sums(k, 1)
        grid = (self.lead * -(-self.e // STRIP["BI"]) * -(-self.e // STRIP["BJ"]),)
        launch(join, grid, top, S, Z, tops, *joined, self.e, n, **STRIP)
        return tops, *joined

    def sums_after(
        self, g: Tensor, q: Tensor, tops: Tensor, den: Tensor, unit: Tensor, dot: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the sums over the queries after each chunk; or those over all queries."""
        n = -(-self.T // self.size)
        R, Z = self.sums(q, n, self.use.kept if self.causal else torch.float32)
        given = (g, q, tops, den, unit, dot, R, Z, self.T, self.H, self.e, n, *strides(g), *strides(q))
        flops = 2.0 * self.B * self.T * self.H * self.e**2
        if self.causal:
            launch(back_states, (self.lead * self.states,), *given, flops=flops, **self.walk)
            return R, Z
        launch(back_totals, (self.lead * n * self.states,), *given, flops=flops, **self.summed)
        return R.sum(2, dtype=torch.float64).float(), Z.sum(2, dtype=torch.float64).float()

    def over_chunks(
        self,
        kernel: triton.JITFunction,
        exact: triton.JITFunction,
        slow: Tensor,
        tensors: tuple[Tensor | None, ...],
        at: int,
        sizes: tuple[int, ...],
        wide: str,
        products: tuple[int, int],
        *,
        marks: bool = False,
        **constants: bool,
    ) -> None:
        """Launch a kernel for each chunk and, in the causal form, the one that looks for the chunks it got wrong.

        ``slow``, the marks, is the argument ``at``, which a kernel without ``marks`` does not take. ``products`` counts
        the products with a state and within a chunk; ``constants`` are of the second kernel alone.
        """
        n, e, chunk = sizes[3], self.e, self.use.chunk
        flops = 2.0 * self.B * n * chunk * self.H * e * (products[0] * e + products[1] * chunk * self.causal)
        options = {**self.fixed, "BK": self.use.step, wide: self.wide}
        with_marks = (*tensors[:at], slow, *tensors[at:])
        grid = (self.lead * n * self.tiles,)
        given = with_marks if marks else tensors
        launch(kernel, grid, *given, *sizes, CAUSAL=self.causal, flops=flops, **options)
        if self.causal:
            tiles = -(-e // EXACT)
            total = self.lead * n * tiles
            sizes = (*sizes[:4], total, *sizes[4:])
            options |= {wide: EXACT, "TILES": tiles, "LOOK": LOOK, "BK": 16, "registers": 255, "warps": 8}
            launch(exact, marks_grid(total), *with_marks, *sizes, **options, **constants)


def saved_shapes(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, heads: int, elu: bool, causal: bool
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides inputs and outputs."""
    return [_saved_shape(q, heads, causal)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, heads: int, elu: bool, causal: bool, save: bool
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, H e), and the tensor saved for the backward pass (empty unless ``save``).

    The features are elu + 1 of q and k, or exp of them.
    """
    q, k, v, mask = rows(q), rows(k), rows(v), bytes_of(mask)
    c = _Call(q, k, heads, elu, causal)
    y, saved = torch.empty(q.shape, dtype=q.dtype, device=q.device), _empty_float32(q, *_saved_shape(q, heads, causal))
    tops, S, Z = c.sums_before(k, v, mask)
    den, unit, slow = c.split(saved)
    sizes = (c.T, heads, c.e, c.chunks(c.T), *strides(q), *strides(k), *strides(v))
    tensors = (q, k, v, mask, tops, S, Z, y, den, unit)
    c.over_chunks(outputs, outputs_exact, slow, tensors, 10, sizes, "BJ", (1, 2), marks=True)
    return y, saved if save else saved.new_empty(0)


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    y: Tensor,
    saved: Tensor,
    *,
    heads: int,
    elu: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv."""
    g, q, k, v, y, mask = rows(g), rows(q), rows(k), rows(v), y.contiguous(), bytes_of(mask)
    c = _Call(q, k, heads, elu, causal)
    tops, S, Z = c.sums_before(k, v, mask)
    (den, unit, slow), dot = c.split(saved), _empty_float32(q, c.B, heads, c.T)
    n, m = c.chunks(c.T), c.chunks(c.S)
    launch(dots, (c.lead * n,), g, y, den, dot, c.T, heads, c.e, n, *strides(g), L=c.use.chunk, BK=32)
    R, ZR = c.sums_after(g, q, tops, den, unit, dot)
    dq, dk, dv = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for a in (q, k, v))
    steps, more = (*strides(g), *strides(q), *strides(k)), strides(v)
    own = (den, unit, dot)
    sizes = (c.T, heads, c.e, n, *steps, *more)
    tensors = (g, q, k, v, mask, tops, S, Z, *own, dq)
    c.over_chunks(back_queries, back_exact, slow, tensors, 11, sizes, "BI", (1, 2), KEYS=False)
    sizes = (c.S, heads, c.e, m, *steps, *more)
    tensors = (g, q, k, v, mask, tops, R, ZR, *own, dk)
    c.over_chunks(back_keys, back_exact, slow, tensors, 11, sizes, "BI", (1, 2), KEYS=True)
    given = (g, q, k, mask, tops, R, den, unit, dv)
    c.over_chunks(back_values, back_values_exact, slow, given, 8, (c.S, heads, c.e, m, *steps), "BJ", (1, 2))
    return dq, dk, dv


def samples() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls on meta tensors that reach every configuration."""
    for dtype, e, (elu, causal, masked) in itertools.product(
        CUTS, (64, 32), itertools.product((True, False), repeat=3)
    ):
        x, mask = (
            torch.empty(2, 256, 4 * e, dtype=dtype, device="meta"),
            torch.empty(2, 256, dtype=torch.bool, device="meta") if masked else None,
        )
        label = f"{str(dtype)[6:]}{' causal' * causal} e={e}{' elu' * elu}{' mask' * masked}"
        yield label, partial(_sample, x, mask, {"heads": 4, "elu": elu, "causal": causal})


def benchmark(B: int, T: int, D: int, heads: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the forms at the benchmark's shape, causal and in bfloat16, as calls on meta tensors."""
    x = torch.empty(B, T, D, dtype=torch.bfloat16, device="meta")
    yield "linear", partial(_sample, x, None, {"heads": heads, "elu": True, "causal": True})


def _sample(x: Tensor, mask: Tensor | None, options: Options) -> None:
    y, saved = forward(x, x, x, mask, **options, save=True)
    backward(x, x, x, x, mask, y, saved, **options)


EXCEPTIONS = dict.fromkeys(
    ("outputs_exact", "back_exact", "back_values_exact"),
    {"room": "works only where a chunk is marked; with the registers of two programs one of them spills"},
) | {
    "back_keys": {"room": "132 registers; with 128 it spills on sm_80"},
    "states": {
        "wide": "16 columns of a matrix, 32 bytes, are its store; wider tiles spill or leave room for one program"
    },
    "back_states": {
        "wide": "16 columns of a matrix, 32 bytes, are its store; wider tiles spill",
        "room": "144 registers; with four warps it spills",
    },
}
