"""Run AFT-full on a GPU: products of matrices by torch, that is cuBLAS, and what is between them in Triton.

    y_t = gate(q_t) * sum_s e^{k_s + w_ts} v_s / sum_s e^{k_s + w_ts}
    E_ts = e^{w_ts - r_t},  X_s = [e^{k_s - m} v_s | e^{k_s - m}],  [num | den] = E X

r_t is the largest weight of row t and m the largest key of each feature, both rounded up to whole numbers. E, without
its future, is written once for a block of rows and serves the whole batch. Rows are multiplied 256 or more at a time,
in the causal form with the keys up to their end; shorter products would read X too often.

If a denominator comes out below 2^-60, a term that counts may have been lost to underflow: its tile is marked, and
another kernel computes it again under the maximum of every row and feature. Such denominators are saved with a minus
sign, with y in place of the numerator, and their part of the gradients is summed term by term too.

Backward, with Z_t = [g_t / D_t | -g_t y_t / D_t]: [G | P] = E^T Z, dv = e^{k - m} G, dk = e^{k - m} (v G + P),
dw = E * (Z X^T). All sums are in float32, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Options
from ._tiles import (
    BY_DTYPE,
    CAP,
    LIMIT,
    LOOK,
    NONE,
    Numbers,
    is_marked,
    key,
    marks_grid,
    operand,
    plus,
    power,
    round_up,
    rows,
    sigmoid,
    span,
    strides,
    tile_of,
    units,
    valid_keys,
    weights,
)
from .launch import add_batch, bytes_of, launch, multiply


@triton.jit
def row_weights(
    W, E, R, row0, n, S, w_batch, w_row, SP, RP, step,
    CAUSAL: tl.constexpr, BASE2: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute r_t and E (Bw, RP, SP) of a block of rows.

    E is zero in the future (as far as it is read, to the next multiple of ``step``) and beyond the end.
    """
    i, s = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, K)
    b = tl.program_id(1).to(tl.int64)
    at = W + b * w_batch + i[:, None] * w_row
    top = tl.full([M], NONE, tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, row0 + (tl.program_id(0) + 1) * M)
    for s0 in span(0, end, K):
        ok = (i < n)[:, None] & (s0 + s < S)[None, :]
        if CAUSAL:
            ok = ok & ((s0 + s)[None, :] <= (row0 + i)[:, None])
        w = weights(at + (s0 + s)[None, :], ok, BASE2)
        top = tl.maximum(top, tl.max(tl.where(ok, w, NONE), 1))
    top = tl.ceil(tl.maximum(top, -1.0e4))
    tl.store(R + b * RP + i, top)
    last = SP
    if CAUSAL:
        last = tl.minimum(SP, tl.cdiv(row0 + (tl.program_id(0) + 1) * M, step) * step)
    for s0 in span(0, last, K):
        ok = (i < n)[:, None] & (s0 + s < S)[None, :]
        if CAUSAL:
            ok = ok & ((s0 + s)[None, :] <= (row0 + i)[:, None])
        w = weights(at + (s0 + s)[None, :], ok, BASE2)
        e = tl.where(ok, power(w - top[:, None], BASE2), 0.0)
        tl.store(E + (b * RP + i[:, None]) * SP + (s0 + s)[None, :], operand(e, E, DROP), mask=(s0 + s < SP)[None, :])


@triton.jit
def key_maxima(
    K_,
    MASK,
    REF,
    S,
    D,
    DP,
    NSEG,
    k_batch,
    k_row,
    BASE2: tl.constexpr,
    SEG: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
):
    """Compute the largest key of each segment of SEG, rounded up: REF (B, NSEG, DP)."""
    pn, seg, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    c = pn * N + tl.arange(0, N)
    top = tl.full([N], NONE, tl.float32)
    for s0 in span(seg * SEG, tl.minimum(S, seg * SEG + SEG), K):
        s = s0 + tl.arange(0, K)
        ok = valid_keys(MASK, b, s, S)[:, None] & (c < D)[None, :]
        k, live = key(K_ + b * k_batch + s[:, None] * k_row + c[None, :], ok, BASE2)
        top = tl.maximum(top, tl.max(tl.where(live, k, NONE), 0))
    tl.store(REF + (b * NSEG + seg) * DP + c, tl.ceil(top))


@triton.jit
def key_terms(
    K_, V, MASK, REF, X, S, D, DP, SP, k_batch, k_row, v_batch, v_row,
    BASE2: tl.constexpr, DROP: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute X (B, SP, 2 DP) in units of the largest key, REF (B, DP); zero for masked keys and beyond the end."""
    c, s, b = (
        tl.program_id(0) * N + tl.arange(0, N),
        tl.program_id(1) * K + tl.arange(0, K),
        tl.program_id(2).to(tl.int64),
    )
    ok = valid_keys(MASK, b, s, S)[:, None] & (c < D)[None, :]
    k, live = key(K_ + b * k_batch + s[:, None] * k_row + c[None, :], ok, BASE2)
    v = tl.load(V + b * v_batch + s[:, None] * v_row + c[None, :], mask=ok & live, other=0.0).to(tl.float32)
    ref = tl.load(REF + b * DP + c)
    e = tl.where(ok & live, power(k - ref[None, :], BASE2), 0.0)
    at = X + (b * SP + s[:, None]) * (2 * DP) + c[None, :]
    tl.store(at, operand(e * v, X, DROP))
    tl.store(at + DP, operand(e, X, DROP))


@triton.jit
def outputs(
    NUM, DEN, FIRST, Q, Y, FLAG, row0, n, T, S, D, n_batch, y_batch, q_batch, q_row,
    CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FM: tl.constexpr,
):  # fmt: skip
    """Divide the sums of n rows (B, n, D) from row0, apply the gate, and mark tiles (FM, N) with small denominators."""
    pn, pf, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    c = pn * N + tl.arange(0, N)
    lost = 0
    for i0 in span(pf * FM, pf * FM + FM, M):
        i = i0 + tl.arange(0, M)
        ok, at = (i < n)[:, None] & (c < D)[None, :], i[:, None] * D + c[None, :]
        num = tl.load(NUM + b * n_batch + at, mask=ok, other=0.0)
        den = tl.load(DEN + b * n_batch + at, mask=ok, other=0.0)
        limit = tl.full([M], LIMIT, tl.float32)  # for each row, with a valid key or without
        if FIRST is not None:
            first = tl.load(FIRST + b)
            limit = tl.where(row0 + i >= first if CAUSAL else i * 0 + first < S, limit, 0.0)
        lost = tl.maximum(lost, tl.max(tl.max((ok & (den < limit[:, None])).to(tl.int32), 1), 0))
        y = num / tl.where(den > 0, den, 1.0)
        if Q is not None:
            q_at = Q + b * q_batch + i[:, None] * q_row + c[None, :]
            y = y * sigmoid(tl.load(q_at, mask=ok, other=0.0).to(tl.float32))
        tl.store(Y + b * y_batch + at, y, mask=ok)
    tl.store(FLAG + (b * tl.cdiv(T, FM) + row0 // FM + pf) * tl.num_programs(0) + pn, lost)


@triton.jit
def _logit(w_at, k_at, MASK, b, s, S, t, inside, CAUSAL: tl.constexpr, BASE2: tl.constexpr):
    """Load the weights (M, 1) and the key (1, N) of one token s, and say which pairs count."""
    k, live = key(k_at, inside & valid_keys(MASK, b, s + tl.arange(0, 1), S), BASE2)
    w = weights(w_at, t >= 0, BASE2)
    ok = live[None, :] & (t >= s)[:, None] if CAUSAL else live[None, :] & (t >= 0)[:, None]
    return w[:, None], k[None, :], ok


@triton.jit
def row_exact(
    W, K_, V, MASK, FLAG, Q, Y, NUM, DEN, TOP, row0, n, B, T, S, D, k_batch, k_row, v_batch, v_row, q_batch, q_row,
    w_batch, w_row,
    CAUSAL: tl.constexpr, BASE2: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FM: tl.constexpr, FN: tl.constexpr,
    LOOK: tl.constexpr,
):  # fmt: skip
    """Look for marked tiles and recompute them, every row and feature under its own maximum.

    If Y is None, compute only these maxima, TOP.
    """
    across, down = tl.cdiv(D, N), tl.cdiv(n, M)
    total = across * down * B
    for start in span(0, total, tl.num_programs(0) * LOOK):
        at = tile_of(start, tl.arange(0, LOOK))
        row = at // across // down * tl.cdiv(T, FM) + (row0 + at // across % down * M) // FM
        marks = tl.load(FLAG + row * tl.cdiv(D, FN) + at % across * N // FN, mask=at < total, other=0)
        for one in span(tl.where(tl.max(marks, 0) != 0, LOOK, 0)):
            if is_marked(marks, one, LOOK):
                tile = tile_of(start, one)
                _row_exact(
                    W, K_, V, MASK, Q, Y, NUM, DEN, TOP, tile % across, tile // across % down,
                    (tile // across // down).to(tl.int64), row0, n, T, S, D, k_batch, k_row, v_batch, v_row,
                    q_batch, q_row, w_batch, w_row, CAUSAL, BASE2, M, N,
                )  # fmt: skip


@triton.jit
def _row_exact(
    W, K_, V, MASK, Q, Y, NUM, DEN, TOP, pn, pm, b, row0, n, T, S, D, k_batch, k_row, v_batch, v_row, q_batch, q_row,
    w_batch, w_row, CAUSAL: tl.constexpr, BASE2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``row_exact``."""
    i, c = pm * M + tl.arange(0, M), pn * N + tl.arange(0, N)
    t = tl.where(i < n, row0 + i, -1)
    w_at, k_at, v_at = W + b * w_batch + i * w_row, K_ + b * k_batch + c, V + b * v_batch + c
    top = tl.full([M, N], NONE, tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, row0 + (pm + 1) * M)
    for s in span(end):
        w, k, ok = _logit(w_at + s, k_at + s * k_row, MASK, b, s, S, t, c < D, CAUSAL, BASE2)
        top = tl.maximum(top, tl.where(ok, w + k, NONE))
    inside = (i < n)[:, None] & (c < D)[None, :]
    at = (b * T + row0 + i[:, None]) * D + c[None, :]
    if TOP is not None:
        tl.store(TOP + at, top, mask=inside)
    if Y is not None:
        num, den = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
        for s0 in span(0, end, 32):
            part_num, part_den = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
            for s in span(s0, tl.minimum(end, s0 + 32)):
                w, k, ok = _logit(w_at + s, k_at + s * k_row, MASK, b, s, S, t, c < D, CAUSAL, BASE2)
                v = tl.load(v_at + s * v_row, mask=(c < D) & valid_keys(MASK, b, s + tl.arange(0, 1), S), other=0.0).to(
                    tl.float32
                )[None, :]
                e = tl.where(ok, power(plus(w, k, top, BASE2), BASE2), 0.0)
                part_num += tl.where(ok, e * v, 0.0)
                part_den += e
            num, den = num + part_num, den + part_den
        y = num / tl.where(den > 0, den, 1.0)
        if NUM is not None:
            tl.store(NUM + at, y, mask=inside)
            tl.store(DEN + at, -den, mask=inside)
        if Q is not None:
            y = y * sigmoid(
                tl.load(Q + b * q_batch + (row0 + i)[:, None] * q_row + c[None, :], mask=inside, other=0.0).to(
                    tl.float32
                )
            )
        tl.store(Y + at, y, mask=inside)


@triton.jit
def row_terms(
    G, Q, NUM, DEN, Z, DQ, FLAG, T, D, DP, g_batch, g_row, q_batch, q_row,
    DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FM: tl.constexpr,
):  # fmt: skip
    """Compute Z (B, T, 2 DP), the gate's gradient, and which tiles (FM, N) hold sums taken term by term.

    Z is zero where sums were taken term by term.
    """
    pn, pf, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    c = pn * N + tl.arange(0, N)
    marked = 0
    for t0 in span(pf * FM, pf * FM + FM, M):
        t = t0 + tl.arange(0, M)
        ok = (t < T)[:, None] & (c < D)[None, :]
        at = (b * T + t[:, None]) * D + c[None, :]
        y, den = tl.load(NUM + at, mask=ok, other=0.0), tl.load(DEN + at, mask=ok, other=0.0)
        y = tl.where(den > 0, y / tl.where(den > 0, den, 1.0), y)
        g = tl.load(G + b * g_batch + t[:, None] * g_row + c[None, :], mask=ok, other=0.0).to(tl.float32)
        if Q is not None:
            q = tl.load(Q + b * q_batch + t[:, None] * q_row + c[None, :], mask=ok, other=0.0).to(tl.float32)
            tl.store(DQ + at, g * y * sigmoid(q) * sigmoid(-q), mask=ok)
            g = g * sigmoid(q)
        z = tl.where(den > 0, g / tl.where(den > 0, den, 1.0), 0.0)
        z_at = Z + (b * T + t[:, None]) * (2 * DP) + c[None, :]
        tl.store(z_at, operand(z, Z, DROP), mask=(t < T)[:, None])
        tl.store(z_at + DP, operand(-z * y, Z, DROP), mask=(t < T)[:, None])
        marked = tl.maximum(marked, tl.max(tl.max((den < 0).to(tl.int32), 1), 0))
    tl.store(FLAG + (b * tl.num_programs(1) + pf) * tl.num_programs(0) + pn, marked)


@triton.jit
def key_gradients(
    SUMS, REF, K_, V, MASK, DK, DV, S, D, SP, DP, k_batch, k_row, v_batch, v_row,
    BASE2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv from SUMS (B, SP, 2 DP), [G | P]."""
    pn, pm, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    s, c = pm * M + tl.arange(0, M), pn * N + tl.arange(0, N)
    inside = (s < S)[:, None] & (c < D)[None, :]
    ok = valid_keys(MASK, b, s, S)[:, None] & (c < D)[None, :]
    k, live = key(K_ + b * k_batch + s[:, None] * k_row + c[None, :], ok, BASE2)
    v = tl.load(V + b * v_batch + s[:, None] * v_row + c[None, :], mask=ok & live, other=0.0).to(tl.float32)
    e = tl.where(ok & live, power(k - tl.load(REF + b * DP + c)[None, :], BASE2), 0.0)
    at = SUMS + (b * SP + s[:, None]) * (2 * DP) + c[None, :]
    g, p = tl.load(at, mask=inside, other=0.0), tl.load(at + DP, mask=inside, other=0.0)
    at = (b * S + s[:, None]) * D + c[None, :]
    tl.store(DV + at, e * g, mask=inside)
    tl.store(DK + at, e * (v * g + p), mask=inside)


@triton.jit
def _row_of(G, Q, NUM, DEN, TOP, at, g_at, q_at, ok):
    """Load what rows summed term by term give to their keys: g / D, y, top; 0 for other rows."""
    den, y = tl.load(DEN + at, mask=ok, other=0.0), tl.load(NUM + at, mask=ok, other=0.0)
    top = tl.load(TOP + at, mask=ok, other=0.0)
    g = tl.load(G + g_at, mask=ok, other=0.0).to(tl.float32)
    if Q is not None:
        g = g * sigmoid(tl.load(Q + q_at, mask=ok, other=0.0).to(tl.float32))
    own = den < 0
    return tl.where(own, g / tl.where(own, -den, 1.0), 0.0), y, tl.where(own, top, 3.0e38)


@triton.jit
def key_exact(
    W, K_, V, MASK, G, Q, NUM, DEN, TOP, FLAG, DK, DV, row0, n, B, T, S, D,
    k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row, w_batch, w_row,
    CAUSAL: tl.constexpr, BASE2: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FM: tl.constexpr, FN: tl.constexpr,
    LOOK: tl.constexpr,
):  # fmt: skip
    """Look for marked tiles, and add to dk and dv of the keys before them what their rows give, term by term."""
    across, down = tl.cdiv(D, N), tl.cdiv(S, M)
    total = across * down * B
    for begin in span(0, total, tl.num_programs(0) * LOOK):
        at = tile_of(begin, tl.arange(0, LOOK))
        marks = tl.zeros([LOOK], tl.int32)
        for f in span(row0 // FM, tl.cdiv(row0 + n, FM)):
            ok = at < total
            if CAUSAL:
                ok = ok & (f >= at // across % down * M // FM)
            row = at // across // down * tl.cdiv(T, FM) + f
            flag = tl.load(FLAG + row * tl.cdiv(D, FN) + at % across * N // FN, mask=ok, other=0)
            marks = tl.maximum(marks, flag)
        for one in span(tl.where(tl.max(marks, 0) != 0, LOOK, 0)):
            if is_marked(marks, one, LOOK):
                tile = tile_of(begin, one)
                _key_exact(
                    W, K_, V, MASK, G, Q, NUM, DEN, TOP, FLAG, DK, DV, tile % across, tile // across % down,
                    (tile // across // down).to(tl.int64), row0, n, T, S, D, k_batch, k_row, v_batch, v_row,
                    g_batch, g_row, q_batch, q_row, w_batch, w_row, CAUSAL, BASE2, M, N, FM, FN,
                )  # fmt: skip


@triton.jit
def _key_exact(
    W, K_, V, MASK, G, Q, NUM, DEN, TOP, FLAG, DK, DV, pn, pm, b, row0, n, T, S, D,
    k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row, w_batch, w_row,
    CAUSAL: tl.constexpr, BASE2: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FM: tl.constexpr, FN: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``key_exact``."""
    s, c = pm * M + tl.arange(0, M), pn * N + tl.arange(0, N)
    ok = valid_keys(MASK, b, s, S)[:, None] & (c < D)[None, :]
    k, live = key(K_ + b * k_batch + s[:, None] * k_row + c[None, :], ok, BASE2)
    ok = ok & live
    v = tl.load(V + b * v_batch + s[:, None] * v_row + c[None, :], mask=ok, other=0.0).to(tl.float32)
    dk, dv = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    start = row0 // FM
    if CAUSAL:
        start = tl.maximum(start, pm * M // FM)
    for f in span(start, tl.cdiv(row0 + n, FM)):
        flag = tl.load(FLAG + (b * tl.cdiv(T, FM) + f) * tl.cdiv(D, FN) + pn * N // FN)
        for t in span(f * FM, tl.where(flag != 0, tl.minimum(row0 + n, f * FM + FM), 0)):
            at = (b * T + t) * D + c
            g_at, q_at = b * g_batch + t * g_row + c, b * q_batch + t * q_row + c
            z, y, top = _row_of(G, Q, NUM, DEN, TOP, at, g_at, q_at, c < D)
            w = weights(W + b * w_batch + (t - row0) * w_row + s, s < S, BASE2)
            pair = ok & (s <= t)[:, None] if CAUSAL else ok
            a = tl.where(pair, power(plus(w[:, None], k, top[None, :], BASE2), BASE2), 0.0) * z[None, :]
            dv += a
            dk += a * (v - y[None, :])
    inside = (s < S)[:, None] & (c < D)[None, :]
    at = (b * S + s[:, None]) * D + c[None, :]
    tl.store(DV + at, tl.load(DV + at, mask=inside, other=0.0).to(tl.float32) + dv, mask=inside)
    tl.store(DK + at, tl.load(DK + at, mask=inside, other=0.0).to(tl.float32) + dk, mask=inside)


@triton.jit
def pair_gradients(
    W, R, SUMS, DW, row0, i0, n, end, S, RP, w_batch, w_row, s_batch, s_row, d_batch, d_row,
    CAUSAL: tl.constexpr, BASE2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute dw = E * SUMS of n rows from i0 of a block from row0; SUMS, Z X^T, has the first ``end`` keys."""
    i, s, b = (
        tl.program_id(1) * M + tl.arange(0, M),
        tl.program_id(0) * N + tl.arange(0, N),
        tl.program_id(2).to(tl.int64),
    )
    inside = (i < n)[:, None] & (s < S)[None, :]
    known = inside & (s < end)[None, :]
    total = tl.load(SUMS + b * s_batch + i[:, None] * s_row + s[None, :], mask=known, other=0.0)
    i += i0
    raw = tl.load(W + b * w_batch + i[:, None] * w_row + s[None, :], mask=known, other=0.0).to(tl.float32)
    e = power(units(raw, BASE2) - tl.load(R + b * RP + i, mask=i < RP, other=0.0)[:, None], BASE2)
    ok = known & (raw <= CAP)
    if CAUSAL:
        ok = ok & (s[None, :] <= (row0 + i)[:, None])
    tl.store(DW + b * d_batch + i[:, None] * d_row + s[None, :], tl.where(ok, e * total, 0.0), mask=inside)


@triton.jit
def pair_exact(
    W, K_, V, MASK, G, Q, NUM, DEN, TOP, FLAG, MARKS, DW, row0, n, B, Bw, T, S, D,
    k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row, w_batch, w_row, d_batch, d_row,
    CAUSAL: tl.constexpr, SHARED: tl.constexpr, BASE2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FM: tl.constexpr, FN: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Look for marked rows of tiles, MARKS (Bw, tiles), and add to dw what they give, term by term."""
    across, down = tl.cdiv(S, N), tl.cdiv(n, M)
    total = across * down * Bw
    for start in span(0, total, tl.num_programs(0) * LOOK):
        at = tile_of(start, tl.arange(0, LOOK))
        row = at // across // down * tl.cdiv(T, FM) + (row0 + at // across % down * M) // FM
        marks = tl.load(MARKS + row, mask=at < total, other=0)
        for one in span(tl.where(tl.max(marks, 0) != 0, LOOK, 0)):
            if is_marked(marks, one, LOOK):
                tile = tile_of(start, one)
                _pair_exact(
                    W, K_, V, MASK, G, Q, NUM, DEN, TOP, FLAG, DW, tile % across, tile // across % down,
                    (tile // across // down).to(tl.int64), row0, n, B, T, S, D, k_batch, k_row, v_batch, v_row,
                    g_batch, g_row, q_batch, q_row, w_batch, w_row, d_batch, d_row,
                    CAUSAL, SHARED, BASE2, M, N, FM, FN,
                )  # fmt: skip


@triton.jit
def _pair_exact(
    W, K_, V, MASK, G, Q, NUM, DEN, TOP, FLAG, DW, ps, pm, first, row0, n, B, T, S, D,
    k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row, w_batch, w_row, d_batch, d_row,
    CAUSAL: tl.constexpr, SHARED: tl.constexpr, BASE2: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FM: tl.constexpr, FN: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``pair_exact``."""
    i, s = pm * M + tl.arange(0, M), ps * N + tl.arange(0, N)
    t, inside = row0 + i, (i < n)[:, None] & (s < S)[None, :]
    at = W + first * w_batch + i[:, None] * w_row + s[None, :]
    w, open_ = weights(at, inside, BASE2), tl.load(at, mask=inside, other=0.0).to(tl.float32) <= CAP
    pairs = inside & open_
    if CAUSAL:
        pairs = pairs & (s[None, :] <= t[:, None])
    count, total = 1, tl.zeros([M, N], tl.float32)
    if SHARED:
        count = B
    if CAUSAL:
        count = tl.where(ps * N > row0 + pm * M + M - 1, 0, count)
    for j in span(count):
        b = first + j
        for f in span(tl.cdiv(D, FN)):
            flag = tl.load(FLAG + (b * tl.cdiv(T, FM) + (row0 + pm * M) // FM) * tl.cdiv(D, FN) + f)
            part = tl.zeros([M, N], tl.float32)
            for c in span(f * FN, tl.where(flag != 0, tl.minimum(D, f * FN + FN), 0)):
                z, y, top = _row_of(
                    G,
                    Q,
                    NUM,
                    DEN,
                    TOP,
                    (b * T + t) * D + c,
                    b * g_batch + t * g_row + c,
                    b * q_batch + t * q_row + c,
                    i < n,
                )
                seen = valid_keys(MASK, b, s, S)
                k, live = key(K_ + b * k_batch + s * k_row + c, seen, BASE2)
                v = tl.load(V + b * v_batch + s * v_row + c, mask=seen & live, other=0.0).to(tl.float32)
                a = tl.where(pairs & live[None, :], power(plus(w, k[None, :], top[:, None], BASE2), BASE2), 0.0)
                part += a * z[:, None] * (v[None, :] - y[:, None])
            total += part
    out = DW + first * d_batch + i[:, None] * d_row + s[None, :]
    tl.store(out, tl.load(out, mask=inside, other=0.0).to(tl.float32) + total, mask=inside)


EXACT: dict[str, int] = {
    "M": 32,
    "N": 32,
    "warps": 8,
    "registers": 128,
    "LOOK": LOOK,
}  # the tiles of the kernels that sum term by term


class Sizes(NamedTuple):
    """Hold the sizes by which the work is cut."""

    rows: int = 128  # of a tile that has one mark
    features: int = 64
    step: int = 256  # the least rows, or keys, of one product; a multiple of ``rows``
    blocks: int = 16  # the most products of a pass
    keys: int = 1024  # of which the largest is found at once
    held: int = 2**27  # log-weights whose exponentials are held at once


SIZES = Sizes()


@dataclass
class _Call:
    """Hold the sizes of a call, its inputs as the kernels take them, and the keys' part of the work, done once."""

    k: Tensor
    v: Tensor
    w: Tensor
    w2: Tensor | None
    mask: Tensor | None
    causal: bool
    sizes: Sizes
    t: Numbers

    def __post_init__(self) -> None:
        t, cut = self.t, self.sizes
        self.B, self.S, self.D = self.k.shape
        self.Bw, self.T = self.w.shape[:2]
        self.shared = self.Bw == 1
        self.SP, self.DP = round_up(self.S, cut.rows), round_up(self.D, cut.features)
        self.strips, self.row_tiles = self.DP // cut.features, -(-self.T // cut.rows)
        self.step = max(cut.step, round_up(-(-max(self.T, self.S) // cut.blocks), cut.rows))
        self.block = max(1, cut.held // (self.Bw * self.SP * self.step)) * self.step
        segments = -(-self.S // cut.keys)
        ref = self.k.new_empty(self.B, segments, self.DP, dtype=torch.float32)
        self.x = self.k.new_empty(self.B, self.SP, 2 * self.DP, dtype=t.operand)
        self.bytes = bytes_of(self.mask)
        fixed = {"BASE2": t.base2, "K": 32, "N": cut.features}
        grid, sizes = (self.strips, segments, self.B), (self.S, self.D, self.DP)
        launch(key_maxima, grid, self.k, self.bytes, ref, *sizes, segments, *strides(self.k), SEG=cut.keys, **fixed)
        self.ref = ref.amax(1)
        tensors = self.k, self.v, self.bytes, self.ref, self.x
        grid, given = (self.strips, self.SP // 32, self.B), (self.SP, *strides(self.k), *strides(self.v))
        launch(key_terms, grid, *tensors, *sizes, *given, DROP=t.drop, **fixed)

    def first(self) -> Tensor | None:
        """Return the first valid key of each row of the batch, S where there is none; None without a mask."""
        if self.mask is None:
            return None
        return torch.where(self.mask.any(1), self.mask.to(torch.uint8).argmax(1), self.S).to(torch.int32)

    def blocks(self) -> list[int]:
        """Return where the blocks of rows begin whose weights are held at once."""
        return list(range(0, self.T, self.block))

    def steps(self, row0: int, n: int) -> Iterator[tuple[int, int, int]]:
        """Yield first and last row, within a block of n rows, of each product, and the number of keys they see."""
        for i in range(0, n, self.step):
            yield i, min(n, i + self.step), min(self.SP, row0 + i + self.step) if self.causal else self.SP

    def log_weights(self, row0: int) -> Tensor:
        """Return the weights of a block of rows, (Bw, n, S).

        Factors are multiplied in float64 where the kernel uses float32, because the rounding would matter.
        """
        cut = slice(row0, row0 + self.block)
        if self.w2 is None:
            return rows(self.w[:, cut])
        wide = torch.float64 if self.k.dtype == torch.float32 else torch.float32
        return (self.w[:, cut].to(wide) @ self.w2.to(wide).mT).float()

    def exponentials(self, w: Tensor, row0: int) -> tuple[Tensor, Tensor]:
        """Compute E, expanded to (B, RP, SP), and r (Bw, RP)."""
        t, n = self.t, w.shape[1]
        RP = round_up(n, 8)
        E, R = w.new_empty(self.Bw, RP, self.SP, dtype=t.operand), w.new_empty(self.Bw, RP, dtype=torch.float32)
        given = row0, n, self.S, *strides(w), self.SP, RP, self.step
        fixed = {"CAUSAL": self.causal, "BASE2": t.base2, "DROP": t.drop, "M": 8, "K": 128}
        launch(row_weights, (RP // 8, self.Bw), w, E, R, *given, **fixed)
        return E.expand(self.B, -1, -1), R

    def exact_tiles(self, across: int, down: int, count: int) -> int:
        """Return the tiles of a kernel that sums term by term."""
        return -(-across // EXACT["N"]) * -(-down // EXACT["M"]) * count

    def exact(
        self,
        row0: int,
        w: Tensor,
        flag: Tensor,
        q: Tensor | None,
        y: Tensor | None,
        num: Tensor | None,
        den: Tensor | None,
        top: Tensor | None,
    ) -> None:
        """Compute the marked tiles of a block of rows term by term; without y only their maxima."""
        n = w.shape[1]
        grid = marks_grid(self.exact_tiles(self.D, n, self.B))
        given = row0, n, self.B, self.T, self.S, self.D, *strides(self.k), *strides(self.v), *strides(q)
        tensors = w, self.k, self.v, self.bytes, flag, q, y, num, den, top
        launch(row_exact, grid, *tensors, *given, self.batch(w), w.stride(1), **self.exact_constants())

    def batch(self, w: Tensor) -> int:
        """Return the batch stride of weights."""
        return 0 if self.shared else w.stride(0)

    def exact_constants(self) -> Options:
        """Return the constants of the kernels that sum term by term."""
        marks = {"FM": self.sizes.rows, "FN": self.sizes.features}
        return {"CAUSAL": self.causal, "BASE2": self.t.base2, **marks, **EXACT}


def saved_shapes(
    q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, w2: Tensor | None, mask: Tensor | None, *, causal: bool
) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors saved for the backward pass besides its inputs: numerators and denominators."""
    return [(k.shape[0], w.shape[1], k.shape[2])] * 2


def forward(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    w2: Tensor | None,
    mask: Tensor | None,
    *,
    causal: bool,
    save: bool,
    sizes: Sizes = SIZES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (B, T, D), its numerators and its denominators (the latter two empty unless ``save``).

    k, v are (B, S, D); the log-weights are w (Bw, T, S), or w w2^T with w (Bw, T, r) and w2 (Bw, S, r); Bw is 1 or B.
    """
    q = None if q is None else rows(q)
    c = _Call(rows(k), rows(v), w, w2, mask, causal, sizes, BY_DTYPE[k.dtype])
    y, held = k.new_empty(c.B, c.T, c.D), (c.B, c.T if save else min(c.T, c.step), c.D)
    num, den = (k.new_empty(held, dtype=torch.float32) for _ in range(2))
    kept: tuple[Tensor | None, Tensor | None] = (num, den) if save else (None, None)
    flag, first = k.new_empty(c.B, c.row_tiles, c.strips, dtype=torch.int32), c.first()
    fixed = {"CAUSAL": causal, "M": 32, "N": sizes.features, "FM": sizes.rows}
    for row0 in c.blocks():
        block = c.log_weights(row0)
        E, _ = c.exponentials(block, row0)
        for i0, i1, end in c.steps(row0, block.shape[1]):
            cut = slice(row0 + i0, row0 + i1)
            parts = tuple(a[:, cut] if save else a[:, : i1 - i0] for a in (num, den))
            for part, column in zip(parts, (0, c.DP), strict=True):
                multiply(E[:, i0:i1, :end], c.x[:, :end, column : column + c.D], part)
            given = row0 + i0, i1 - i0, c.T, c.S, c.D, num.stride(0), y.stride(0), *strides(q)
            tensors = *parts, first, None if q is None else q[:, cut], y[:, cut], flag
            launch(outputs, (c.strips, -(-(i1 - i0) // sizes.rows), c.B), *tensors, *given, **fixed)
        c.exact(row0, block, flag, q, y, *kept, None)
    return (y, num, den) if save else (y, num.new_empty(0), den.new_empty(0))


def backward(
    g: Tensor, q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, w2: Tensor | None, mask: Tensor | None, num: Tensor,
    den: Tensor, *,
    causal: bool, sizes: Sizes = SIZES,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq (empty without q), dk, dv, dw, dw2 (empty without w2)."""
    g, q = rows(g), None if q is None else rows(q)
    c = _Call(rows(k), rows(v), w, w2, mask, causal, sizes, BY_DTYPE[k.dtype])
    b = _Backward(c, g, q, num, den)
    dw, dw2 = (
        torch.empty_like(w, memory_format=torch.contiguous_format),
        w.new_zeros((0,) if w2 is None else w2.shape, dtype=torch.float32),
    )
    blocks = c.blocks()
    block = None
    for row0 in reversed(blocks):
        block = c.log_weights(row0)
        own = b.block(row0, block, dw if w2 is None else None)
        if w2 is not None:
            cut = slice(row0, row0 + block.shape[1])
            dw[:, cut] = (own @ w2.float()).to(w.dtype)
            dw2 += own.mT @ w[:, cut].float()
    b.keys()
    for row0 in blocks:
        b.keys_exact(row0, block if len(blocks) == 1 and block is not None else c.log_weights(row0))
    return b.dq, b.dk, b.dv, dw, dw2.to(k.dtype if w2 is None else w.dtype)


class _Backward:
    """The gradients of one call, one block of rows after another, the last first."""

    def __init__(self, c: _Call, g: Tensor, q: Tensor | None, num: Tensor, den: Tensor):
        cut = c.sizes
        self.c, self.g, self.q, self.num, self.den = c, g, q, num, den
        self.dq = g.new_empty((0,) if q is None else q.shape, dtype=c.k.dtype)
        self.dk, self.dv = (torch.empty_like(a, memory_format=torch.contiguous_format) for a in (c.k, c.v))
        self.z = g.new_empty(c.B, c.T, 2 * c.DP, dtype=c.t.operand)
        self.flag = g.new_empty(c.B, c.row_tiles, c.strips, dtype=torch.int32)
        self.top = torch.empty_like(num)
        self.sums = g.new_empty(c.B, c.SP, 2 * c.DP, dtype=torch.float32)
        given = c.T, c.D, c.DP, *strides(g), *strides(q)
        tensors = g, q, num, den, self.z, None if q is None else self.dq, self.flag
        fixed = {"DROP": c.t.drop, "M": 32, "N": cut.features, "FM": cut.rows}
        launch(row_terms, (c.strips, c.row_tiles, c.B), *tensors, *given, **fixed)

    def block(self, row0: int, w: Tensor, dw: Tensor | None) -> Tensor:
        """Compute the sums of a block of rows for dk and dv, and its dw.

        It goes into ``dw`` (Bw, T, S), or is returned as (Bw, n, S) in float32.
        """
        c, n = self.c, w.shape[1]
        E, R = c.exponentials(w, row0)
        z = self.z[:, row0 : row0 + n]
        for s in range(0, min(c.SP, round_up(row0 + n, c.step)) if c.causal else c.SP, c.step):
            i, end = max(0, s - row0) if c.causal else 0, min(c.SP, s + c.step)
            multiply(E[:, i:n, s:end].mT, z[:, i:], self.sums[:, s:end], add=row0 + n < c.T)
        out = w.new_empty(c.Bw, n, c.S, dtype=torch.float32) if dw is None else dw[:, row0 : row0 + n]
        for i0, i1, end in c.steps(row0, n):
            parts = w.new_empty(c.B, i1 - i0, end, dtype=torch.float32)
            multiply(z[:, i0:i1], c.x[:, :end].mT, parts)
            parts = add_batch(parts) if c.shared else parts
            sizes = row0, i0, i1 - i0, end, c.S, R.shape[1], *strides(w), *strides(parts), *strides(out)
            grid, fixed = (-(-c.S // 64), -(-(i1 - i0) // 4), c.Bw), {"CAUSAL": c.causal, "BASE2": c.t.base2}
            launch(pair_gradients, grid, w, R, parts, out[:, i0:i1], *sizes, M=4, N=64, warps=1, **fixed)
        c.exact(row0, w, self.flag, None, None, None, None, self.top)
        marks = self.flag.amax(2)
        marks = marks.amax(0) if c.shared else marks
        look = marks_grid(c.exact_tiles(c.S, n, c.Bw))
        given = row0, n, c.B, c.Bw, c.T, c.S, c.D, *self._strides(), *strides(w), *strides(out)
        launch(pair_exact, look, *self._inputs(w), marks, out, *given, SHARED=c.shared, **c.exact_constants())
        return out

    def keys(self) -> None:
        """Compute dk and dv from the sums of all rows."""
        c = self.c
        tensors = self.sums, c.ref, c.k, c.v, c.bytes, self.dk, self.dv
        given = c.S, c.D, c.SP, c.DP, *strides(c.k), *strides(c.v)
        grid, fixed = (c.strips, c.SP // 32, c.B), {"BASE2": c.t.base2, "M": 32, "N": c.sizes.features}
        launch(key_gradients, grid, *tensors, *given, **fixed)

    def keys_exact(self, row0: int, w: Tensor) -> None:
        """Add what the marked tiles of a block of rows give to dk and dv."""
        c = self.c
        grid = marks_grid(c.exact_tiles(c.D, c.S, c.B))
        given = row0, w.shape[1], c.B, c.T, c.S, c.D, *self._strides(), c.batch(w), w.stride(1)
        launch(key_exact, grid, *self._inputs(w), self.dk, self.dv, *given, **c.exact_constants())

    def _inputs(self, w: Tensor) -> tuple[Tensor | None, ...]:
        c = self.c
        return w, c.k, c.v, c.bytes, self.g, self.q, self.num, self.den, self.top, self.flag

    def _strides(self) -> tuple[int, ...]:
        return (*strides(self.c.k), *strides(self.c.v), *strides(self.g), *strides(self.q))


def _sample(dtype: torch.dtype, causal: bool, masked: bool, gate: bool, factors: bool, batched: bool) -> None:
    B, T, D, r = 4, 4096, 512, 128
    S = T if causal else 2 * T
    q, k = (torch.empty(B, n, D, dtype=dtype, device="meta") for n in (T, S))
    w = torch.empty(B if batched else 1, T, r if factors else S, dtype=dtype, device="meta")
    w2 = torch.empty(B if batched else 1, S, r, dtype=dtype, device="meta") if factors else None
    mask = torch.empty(B, S, dtype=torch.bool, device="meta") if masked else None
    forward(q if gate else None, k, k, w, w2, mask, causal=causal, save=False)
    _both(q if gate else None, k, w, w2, mask, causal)


def _both(q: Tensor | None, k: Tensor, w: Tensor, w2: Tensor | None, mask: Tensor | None, causal: bool) -> None:
    y, num, den = forward(q, k, k, w, w2, mask, causal=causal, save=True)
    backward(y, q, k, k, w, w2, mask, num, den, causal=causal)


def benchmark(B: int, T: int, D: int, heads: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the forms at the benchmark's shape, causal and in bfloat16, as calls on meta tensors."""
    x = torch.empty(B, T, D, dtype=torch.bfloat16, device="meta")
    yield "aft_full", partial(_both, x, x, x.new_empty(1, T, T), None, None, True)


def samples() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield calls on meta tensors that together launch every configuration."""
    for dtype in BY_DTYPE:
        name = str(dtype).removeprefix("torch.")
        for causal in (True, False):
            what = f"{name} {'causal' if causal else 'all'}"
            yield what, partial(_sample, dtype, causal, False, True, False, False)
            yield f"{what} mask", partial(_sample, dtype, causal, True, False, False, True)
        yield f"{name} factors", partial(_sample, dtype, True, True, True, True, False)


EXCEPTIONS = {
    "row_weights": dict.fromkeys(("wide", "grid"), "4 MB of log-weights, once for the whole batch"),
}
