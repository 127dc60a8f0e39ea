"""Run AFT-local and AFT-conv in one dimension in Triton, on the tensor cores: log-weights inside a band, 0 outside.

Time is cut into blocks. The rows of block i meet the near keys, those of blocks i - NL .. i + NR, one by one as a
matrix product; all other keys have the weight exp(0) and enter as sums over whole blocks, before and after:

    num = E X + e^{-r} (past + future),  E_ts = e^{w_ts - r_t},  X_s = [e^{k_s - m} v_s | e^{k_s - m}]

r_t is the largest log-weight of a row, and m the largest key of each feature among all that the block meets, both
rounded up to whole numbers. Only positive terms are added. E of a band that is the same for all rows (a convolution) is
one tile per head.

If a denominator comes out below 2^-60, a term that counts may have been lost to underflow: its tile is marked, and
another kernel computes it again under the maximum of every row and feature. Such denominators are saved with a minus
sign, and their part of the gradients is summed term by term too.

Backward: Z_t = [g_t / D_t | -g_t y_t / D_t]; near keys get E^T Z, far ones the sums of Z over whole blocks of rows, in
units that only ever grow, so that every factor is at most 1; dw is the band of E * (Z X^T). The order of sums is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Options
from ._tiles import (
    BY_DTYPE,
    CAP,
    LIMIT,
    NONE,
    Tiles,
    key,
    operand,
    plus,
    power,
    rows,
    sigmoid,
    span,
    strides,
    units,
    valid_keys,
    weights,
)
from .launch import bytes_of, launch

BLOCK = {
    torch.bfloat16: (64, 64),
    torch.float16: (64, 64),
    torch.float32: (32, 64),
}  # tokens of a block, features of a tile
# tokens, and features of a gradient of weights, multiplied at once
STEP = {torch.bfloat16: (32, 32), torch.float16: (32, 16), torch.float32: (16, 16)}
# loads ahead of a step of that gradient, which cost registers
STAGES = {torch.bfloat16: 3, torch.float16: 2, torch.float32: 1}


@triton.jit
def _strip(D, H, N: tl.constexpr):
    """Return the features of a program, all in one head: the head, their numbers, which exist, and their strip."""
    strip, width = tl.program_id(0), D // H
    head, c = strip // tl.cdiv(width, N), strip % tl.cdiv(width, N) * N + tl.arange(0, N)
    return head, head * width + c, c < width, strip


@triton.jit
def _triple(ST, b, i, NB, D, c, inside):
    """Load (m, num, den) of block i of ST (B, NB, 3, D), or that of no keys where there is no such block."""
    block = i + c * 0
    ok = inside & (block >= 0) & (block < NB)
    p = ST + (b * NB + i) * 3 * D + c
    return tl.load(p, mask=ok, other=NONE), tl.load(p + D, mask=ok, other=0.0), tl.load(p + 2 * D, mask=ok, other=0.0)


@triton.jit
def _keep(ST, b, i, NB, D, c, inside, m, num, den):
    p = ST + (b * NB + i) * 3 * D + c
    tl.store(p, m, mask=inside)
    tl.store(p + D, num, mask=inside)
    tl.store(p + 2 * D, den, mask=inside)


@triton.jit
def _tile(K_, V, MASK, b, s, T, kc, c, inside, k_batch, k_row, v_batch, v_row, BASE2: tl.constexpr):
    """Load keys and values (s, c), and say which count; s is (M, 1), c is (1, N)."""
    ok = valid_keys(MASK, b, s, T) & inside
    k, live = key(K_ + b * k_batch + s * k_row + kc, ok, BASE2)
    ok = ok & live
    return k, tl.load(V + b * v_batch + s * v_row + c, mask=ok, other=0.0).to(tl.float32), ok


@triton.jit
def band_weights(
    W, E, R, T, L, H, w_batch, w_head, w_row, NT, NL, LOW, CAUSAL: tl.constexpr, BY_ROW: tl.constexpr,
    BASE2: tl.constexpr, DROP: tl.constexpr,
    WIDTH: tl.constexpr, BLK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute r (G, NT, BLK) and E (G, NT, BLK, WIDTH), G = batch x heads of the weights."""
    i, g = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * M + tl.arange(0, M)
    t = i * BLK + r
    at = W + g // H * w_batch + g % H * w_head + t[:, None] * w_row
    top = tl.zeros([M], tl.float32)
    for x0 in range(0, WIDTH, BLK):
        offset = (x0 + tl.arange(0, BLK))[None, :] - NL * BLK - r[:, None]
        near = (offset + LOW >= 0) & (offset + LOW < L)
        if BY_ROW:
            near = near & (t < T)[:, None] & (t[:, None] + offset >= 0) & (t[:, None] + offset < T)
        top = tl.maximum(top, tl.max(tl.where(near, weights(at + offset + LOW, near, BASE2), 0.0), 1))
    top = tl.ceil(top)
    tl.store(R + (g * NT + i) * BLK + r, top)
    for x0 in range(0, WIDTH, BLK):
        offset = (x0 + tl.arange(0, BLK))[None, :] - NL * BLK - r[:, None]
        near = (offset + LOW >= 0) & (offset + LOW < L)
        if BY_ROW:
            near = near & (t < T)[:, None] & (t[:, None] + offset >= 0) & (t[:, None] + offset < T)
        e = power(weights(at + offset + LOW, near, BASE2) - top[:, None], BASE2)
        if CAUSAL:
            e = tl.where(offset <= 0, e, 0.0)
        tl.store(E + ((g * NT + i) * BLK + r[:, None]) * WIDTH + (x0 + tl.arange(0, BLK))[None, :], operand(e, E, DROP))


@triton.jit
def block_sums(
    K_,
    V,
    MASK,
    ST,
    T,
    D,
    H,
    NB,
    k_batch,
    k_row,
    v_batch,
    v_row,
    PER_HEAD: tl.constexpr,
    BASE2: tl.constexpr,
    BLK: tl.constexpr,
    N: tl.constexpr,
):
    """Compute the triple (m, num, den) of each block of keys, ST (B, NB, 3, D)."""
    head, c, inside, _ = _strip(D, H, N)
    i, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kc = (c * 0 + head if PER_HEAD else c)[None, :]
    s = i * BLK + tl.arange(0, BLK)
    k, v, ok = _tile(
        K_, V, MASK, b, s[:, None], T, kc, c[None, :], inside[None, :], k_batch, k_row, v_batch, v_row, BASE2
    )
    m = tl.ceil(tl.max(tl.where(ok, k, NONE), 0))
    e = tl.where(ok, power(k - m[None, :], BASE2), 0.0)
    _keep(ST, b, i, NB, D, c, inside, m, tl.sum(e * v, 0), tl.sum(e, 0))


@triton.jit
def carry(ST, PAST, FUTURE, NB, D, CAUSAL: tl.constexpr, BASE2: tl.constexpr, N: tl.constexpr):
    """Join the triples of all blocks before each, and of all after it."""
    c, b = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    inside = c < D
    m, num, den = tl.full([N], NONE, tl.float32), tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    for i in span(NB):
        _keep(PAST, b, i, NB, D, c, inside, m, num, den)
        own, n, d = _triple(ST, b, i, NB, D, c, inside)
        top = tl.maximum(m, own)
        x, y = power(m - top, BASE2), power(own - top, BASE2)
        m, num, den = top, num * x + n * y, den * x + d * y
    if not CAUSAL:
        m, num, den = tl.full([N], NONE, tl.float32), tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
        for j in span(NB):
            i = NB - 1 - j
            _keep(FUTURE, b, i, NB, D, c, inside, m, num, den)
            own, n, d = _triple(ST, b, i, NB, D, c, inside)
            top = tl.maximum(m, own)
            x, y = power(m - top, BASE2), power(own - top, BASE2)
            m, num, den = top, num * x + n * y, den * x + d * y


@triton.jit
def _maximum(ST, PAST, FUTURE, b, i, NB, D, c, inside, NL, NR, CAUSAL: tl.constexpr):
    """Return the largest key that rows of block i meet."""
    top, _, _ = _triple(PAST, b, i - NL, NB, D, c, inside)
    if not CAUSAL:
        m, _, _ = _triple(FUTURE, b, i + NR, NB, D, c, inside)
        top = tl.maximum(top, m)
    for j in span(i - NL, i + NR + 1):
        m, _, _ = _triple(ST, b, j, NB, D, c, inside)
        top = tl.maximum(top, m)
    return top


@triton.jit
def band_rows(
    E, R, ST, PAST, FUTURE, FIRST, K_, V, MASK, Q, Y, SAVED, FLAG, B, T, D, H, NB, NL, NR, e_batch, e_head, e_block,
    k_batch, k_row, v_batch, v_row, q_batch, q_row,
    CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, BASE2: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, BLK: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows; SAVED (3, B, T, D) receives y before the gate, the denominators and the maxima."""
    head, c, inside, strip = _strip(D, H, N)
    i, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r = tl.arange(0, BLK)
    e_tile = b * e_batch + head * e_head + i * e_block
    top = _maximum(ST, PAST, FUTURE, b, i, NB, D, c, inside, NL, NR, CAUSAL)
    m, n, d = _triple(PAST, b, i - NL, NB, D, c, inside)
    far_num, far_den = n * power(m - top, BASE2), d * power(m - top, BASE2)
    if not CAUSAL:
        m, n, d = _triple(FUTURE, b, i + NR, NB, D, c, inside)
        far_num, far_den = far_num + n * power(m - top, BASE2), far_den + d * power(m - top, BASE2)
    r_top = tl.load(R + e_tile * BLK + r)
    low = power(-r_top, BASE2)[:, None]
    num, den = low * far_num[None, :], low * far_den[None, :]
    kc = (c * 0 + head if PER_HEAD else c)[None, :]
    for x0 in range(0, WIDTH, K):
        x = x0 + tl.arange(0, K)
        s = (i - NL) * BLK + x
        k, v, ok = _tile(
            K_,
            V,
            MASK,
            b,
            s[:, None],
            T,
            kc,
            c[None, :],
            inside[None, :] & (s >= 0)[:, None],
            k_batch,
            k_row,
            v_batch,
            v_row,
            BASE2,
        )
        e = tl.load(E + (e_tile * BLK + r[:, None]) * WIDTH + x[None, :])
        x = tl.where(ok, power(k - top[None, :], BASE2), 0.0)
        num = tl.dot(e, operand(x * v, E, DROP), num, input_precision=PRECISION)
        den = tl.dot(e, operand(x, E, DROP), den, input_precision=PRECISION)
    t = i * BLK + r
    ok = (t < T)[:, None] & inside[None, :]
    some = ok
    if FIRST is not None:
        first = tl.load(FIRST + b)
        some = ok & (t[:, None] >= first if CAUSAL else first < T)
    tl.store(
        FLAG + (b * NB + i) * tl.num_programs(0) + strip, tl.max(tl.max((some & (den < LIMIT)).to(tl.int32), 1), 0)
    )
    y = num / tl.where(den > 0, den, 1.0)
    at = (b * T + t[:, None]) * D + c[None, :]
    if SAVED is not None:
        size = (b * 0 + B) * T * D
        tl.store(SAVED + at, y, mask=ok)
        tl.store(SAVED + size + at, den, mask=ok)
        tl.store(SAVED + 2 * size + at, r_top[:, None] + top[None, :], mask=ok)
    if Q is not None:
        y = y * sigmoid(tl.load(Q + b * q_batch + t[:, None] * q_row + c[None, :], mask=ok, other=0.0).to(tl.float32))
    tl.store(Y + at, y, mask=ok)


@triton.jit
def band_rows_exact(
    W, PAST, FUTURE, K_, V, MASK, Q, Y, SAVED, FLAG, B, T, D, H, L, NB, NL, NR, LOW, w_batch, w_head, w_row,
    k_batch, k_row, v_batch, v_row, q_batch, q_row,
    CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, BASE2: tl.constexpr, BLK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Recompute marked tiles, every row and feature under its own maximum."""
    head, c, inside, strip = _strip(D, H, N)
    pm, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i = pm * M // BLK
    if tl.load(FLAG + (b * NB + i) * tl.num_programs(0) + strip) != 0:
        t = pm * M + tl.arange(0, M)
        w_at = W + b * w_batch + head * w_head + t * w_row + LOW - t
        kc = (c * 0 + head if PER_HEAD else c)[None, :]
        one, zero = tl.arange(0, 1)[:, None], tl.zeros([M, N], tl.float32)
        past, past_num, past_den = _triple(PAST, b, i - NL, NB, D, c, inside)
        far, far_num, far_den = past, past_num, past_den
        if not CAUSAL:
            far, far_num, far_den = _triple(FUTURE, b, i + NR, NB, D, c, inside)
        start, end = tl.maximum(0, (i - NL) * BLK), tl.minimum(T, (i + NR + 1) * BLK)
        if CAUSAL:
            end = tl.minimum(end, (pm + 1) * M)
        top = tl.maximum(past, far)[None, :] + zero
        for s in span(start, end):
            k, _, ok = _tile(
                K_, V, MASK, b, s + one, T, kc, c[None, :], inside[None, :], k_batch, k_row, v_batch, v_row, BASE2
            )
            w = weights(w_at + s, (t < T) & (s - t + LOW >= 0) & (s - t + LOW < L), BASE2)[:, None]
            if CAUSAL:
                ok = ok & (s <= t)[:, None]
            top = tl.maximum(top, tl.where(ok, w + k, NONE))
        x = power(past[None, :] - top, BASE2)
        num, den = past_num[None, :] * x, past_den[None, :] * x
        if not CAUSAL:
            x = power(far[None, :] - top, BASE2)
            num, den = num + far_num[None, :] * x, den + far_den[None, :] * x
        for s in span(start, end):
            k, v, ok = _tile(
                K_, V, MASK, b, s + one, T, kc, c[None, :], inside[None, :], k_batch, k_row, v_batch, v_row, BASE2
            )
            w = weights(w_at + s, (t < T) & (s - t + LOW >= 0) & (s - t + LOW < L), BASE2)[:, None]
            if CAUSAL:
                ok = ok & (s <= t)[:, None]
            e = tl.where(ok, power(plus(w, k, top, BASE2), BASE2), 0.0)
            num, den = num + e * v, den + e
        ok = (t < T)[:, None] & inside[None, :]
        y = num / tl.where(den > 0, den, 1.0)
        at = (b * T + t[:, None]) * D + c[None, :]
        if SAVED is not None:
            size = (b * 0 + B) * T * D
            tl.store(SAVED + at, y, mask=ok)
            tl.store(SAVED + size + at, -den, mask=ok)
            tl.store(SAVED + 2 * size + at, top, mask=ok)
        if Q is not None:
            y = y * sigmoid(
                tl.load(Q + b * q_batch + t[:, None] * q_row + c[None, :], mask=ok, other=0.0).to(tl.float32)
            )
        tl.store(Y + at, y, mask=ok)


@triton.jit
def _row(G, Q, SAVED, b, t, B, T, D, c, ok, g_batch, g_row, q_batch, q_row):
    """Load what rows give to the backward pass: g times the gate, y, the signed denominator, the maximum."""
    size = (b * 0 + B) * T * D
    at = SAVED + (b * T + t) * D + c
    y, den, top = (
        tl.load(at, mask=ok, other=0.0),
        tl.load(at + size, mask=ok, other=0.0),
        tl.load(at + 2 * size, mask=ok, other=3.0e38),
    )
    g = tl.load(G + b * g_batch + t * g_row + c, mask=ok, other=0.0).to(tl.float32)
    if Q is not None:
        g = g * sigmoid(tl.load(Q + b * q_batch + t * q_row + c, mask=ok, other=0.0).to(tl.float32))
    return g, y, den, top


@triton.jit
def band_terms(
    G, Q, SAVED, ST, PAST, FUTURE, Z, DQ, TOP, U, FLAG, B, T, D, H, NB, NL, NR, g_batch, g_row, q_batch, q_row,
    CAUSAL: tl.constexpr, BASE2: tl.constexpr, DROP: tl.constexpr, BLK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute Z (B, NB BLK, 2, D), zero where the sums were taken term by term, and the gate's gradient.

    Also compute TOP (B, NB, D), the largest key of each block of rows; U (B, NB, 4, D), what a block of rows gives to
    keys far before and far after it; and which tiles hold sums taken term by term.
    """
    head, c, inside, strip = _strip(D, H, N)
    i, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = i * BLK + tl.arange(0, BLK)
    ok = (t < T)[:, None] & inside[None, :]
    g, y, den, top = _row(G, Q, SAVED, b, t[:, None], B, T, D, c[None, :], ok, g_batch, g_row, q_batch, q_row)
    if Q is not None:
        q = tl.load(Q + b * q_batch + t[:, None] * q_row + c[None, :], mask=ok, other=0.0).to(tl.float32)
        tl.store(DQ + (b * T + t[:, None]) * D + c[None, :], g * y * sigmoid(-q), mask=ok)
    z = tl.where(den != 0, g / tl.where(den != 0, tl.abs(den), 1.0), 0.0)
    near = tl.where(den > 0, z, 0.0)
    at = Z + (b * NB * BLK + t[:, None]) * (2 * D) + c[None, :]
    tl.store(at, operand(near, Z, DROP), mask=inside[None, :])
    tl.store(at + D, operand(-near * y, Z, DROP), mask=inside[None, :])
    tl.store(
        TOP + (b * NB + i) * D + c, _maximum(ST, PAST, FUTURE, b, i, NB, D, c, inside, NL, NR, CAUSAL), mask=inside
    )
    out = U + (b * NB + i) * 4 * D + c
    m, _, _ = _triple(PAST, b, i - NL, NB, D, c, inside)
    far = tl.where(ok, power(m[None, :] - top, BASE2), 0.0) * z
    tl.store(out, tl.sum(far, 0), mask=inside)
    tl.store(out + D, tl.sum(-far * y, 0), mask=inside)
    if not CAUSAL:
        m, _, _ = _triple(FUTURE, b, i + NR, NB, D, c, inside)
        far = tl.where(ok, power(m[None, :] - top, BASE2), 0.0) * z
        tl.store(out + 2 * D, tl.sum(far, 0), mask=inside)
        tl.store(out + 3 * D, tl.sum(-far * y, 0), mask=inside)
    tl.store(FLAG + (b * NB + i) * tl.num_programs(0) + strip, tl.max(tl.max((den < 0).to(tl.int32), 1), 0))


@triton.jit
def carry_back(U, ST, PAST, FUTURE, OUT, NB, D, NL, NR, CAUSAL: tl.constexpr, BASE2: tl.constexpr, N: tl.constexpr):
    """Sum what each block of keys gets from the rows that give it the weight exp(0).

    OUT (B, NB, 2, D) is in units of the block's own maximum.
    """
    c, b = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    inside = c < D
    G, P, unit = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32), tl.full([N], -NONE, tl.float32)
    for j in span(NB):
        s = NB - 1 - j
        i = s + NL + 1  # the first block of rows far behind
        some = inside & (i + c * 0 < NB)
        m, _, _ = _triple(PAST, b, s + 1, NB, D, c, inside)
        x = tl.where(some, power(m - unit, BASE2), 0.0)
        at = U + (b * NB + i) * 4 * D + c
        G, P = G * x + tl.load(at, mask=some, other=0.0), P * x + tl.load(at + D, mask=some, other=0.0)
        unit = tl.where(some, m, unit)
        own, _, _ = _triple(ST, b, s, NB, D, c, inside)
        x = tl.where(some, power(own - m, BASE2), 0.0)
        out = OUT + (b * NB + s) * 2 * D + c
        tl.store(out, G * x, mask=inside)
        tl.store(out + D, P * x, mask=inside)
    if not CAUSAL:
        G, P, unit = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32), tl.full([N], -NONE, tl.float32)
        for s in span(NB):
            i = s - NR - 1  # the last block of rows far ahead
            some = inside & (i + c * 0 >= 0)
            m, _, _ = _triple(FUTURE, b, s - 1, NB, D, c, inside)
            x = tl.where(some, power(m - unit, BASE2), 0.0)
            at = U + (b * NB + i) * 4 * D + 2 * D + c
            G, P = G * x + tl.load(at, mask=some, other=0.0), P * x + tl.load(at + D, mask=some, other=0.0)
            unit = tl.where(some, m, unit)
            own, _, _ = _triple(ST, b, s, NB, D, c, inside)
            x = tl.where(some, power(own - m, BASE2), 0.0)
            out = OUT + (b * NB + s) * 2 * D + c
            tl.store(out, tl.load(out, mask=inside, other=0.0) + G * x, mask=inside)
            tl.store(out + D, tl.load(out + D, mask=inside, other=0.0) + P * x, mask=inside)


@triton.jit
def band_keys(
    E, Z, ST, TOP, OUT, K_, V, MASK, DK, DV, T, D, H, NB, NL, NR, e_batch, e_head, e_block, k_batch, k_row, v_batch,
    v_row,
    PER_HEAD: tl.constexpr, BASE2: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr,
    BLK: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """Compute dk (feature by feature) and dv of a block of keys, from M rows at once."""
    head, c, inside, _ = _strip(D, H, N)
    j, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r = tl.arange(0, BLK)
    own, _, _ = _triple(ST, b, j, NB, D, c, inside)
    out = OUT + (b * NB + j) * 2 * D + c
    zero = tl.zeros([BLK, N], tl.float32)
    G, P = (
        zero + tl.load(out, mask=inside, other=0.0)[None, :],
        zero + tl.load(out + D, mask=inside, other=0.0)[None, :],
    )
    for part in span(tl.maximum(0, j - NR) * (BLK // M), tl.minimum(NB, j + NL + 1) * (BLK // M)):
        i, row = part // (BLK // M), part % (BLK // M) * M + tl.arange(0, M)
        scale = power(own - tl.load(TOP + (b * NB + i) * D + c, mask=inside, other=0.0), BASE2)[None, :]
        at = Z + (b * NB + i) * BLK * (2 * D) + (row[:, None] * (2 * D) + c[None, :])
        zg = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32) * scale
        zp = tl.load(at + D, mask=inside[None, :], other=0.0).to(tl.float32) * scale
        tile = (b * e_batch + head * e_head + i * e_block) * BLK
        e = tl.load(E + (tile + row[None, :]) * WIDTH + (j - i + NL) * BLK + r[:, None])
        G = tl.dot(e, operand(zg, E, DROP), G, input_precision=PRECISION)
        P = tl.dot(e, operand(zp, E, DROP), P, input_precision=PRECISION)
    s = j * BLK + r
    kc = (c * 0 + head if PER_HEAD else c)[None, :]
    k, v, ok = _tile(
        K_, V, MASK, b, s[:, None], T, kc, c[None, :], inside[None, :], k_batch, k_row, v_batch, v_row, BASE2
    )
    e = tl.where(ok, power(k - own[None, :], BASE2), 0.0)
    first, at, ok = (b * T + j * BLK) * D, r[:, None] * D + c[None, :], (s < T)[:, None] & inside[None, :]
    tl.store(DV + first + at, e * G, mask=ok)
    tl.store(DK + first + at, e * (v * G + P), mask=ok)


@triton.jit
def band_keys_exact(
    W, K_, V, MASK, G, Q, SAVED, FLAG, DK, DV, B, T, D, H, L, NB, NL, NR, LOW, w_batch, w_head, w_row,
    k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row,
    CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, BASE2: tl.constexpr, BLK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv what the rows of marked tiles nearby give, term by term."""
    head, c, inside, strip = _strip(D, H, N)
    pm, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    s, j = pm * M + tl.arange(0, M), pm * M // BLK
    kc = (c * 0 + head if PER_HEAD else c)[None, :]
    k, v, ok = _tile(
        K_, V, MASK, b, s[:, None], T, kc, c[None, :], inside[None, :], k_batch, k_row, v_batch, v_row, BASE2
    )
    dk, dv, marked = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32), 0
    one = tl.arange(0, 1)[:, None]
    for i in span(tl.maximum(0, j - NR), tl.minimum(NB, j + NL + 1)):
        flag = tl.load(FLAG + (b * NB + i) * tl.num_programs(0) + strip)
        marked = tl.maximum(marked, flag)
        for t in span(i * BLK, tl.where(flag != 0, tl.minimum(T, i * BLK + BLK), 0)):
            g, y, den, top = _row(
                G, Q, SAVED, b, t + one, B, T, D, c[None, :], inside[None, :], g_batch, g_row, q_batch, q_row
            )
            near = (s < T) & (s - t + LOW >= 0) & (s - t + LOW < L)
            w = weights(W + b * w_batch + head * w_head + t * w_row + LOW + s - t, near, BASE2)[:, None]
            pair = ok & (den < 0)
            if CAUSAL:
                pair = pair & (s <= t)[:, None]
            a = tl.where(pair, power(plus(w, k, top, BASE2), BASE2), 0.0) * (g / tl.where(den < 0, -den, 1.0))
            dv += a
            dk += a * (v - y)
    if marked != 0:
        at, ok = (b * T + s[:, None]) * D + c[None, :], (s < T)[:, None] & inside[None, :]
        tl.store(DV + at, tl.load(DV + at, mask=ok, other=0.0).to(tl.float32) + dv, mask=ok)
        tl.store(DK + at, tl.load(DK + at, mask=ok, other=0.0).to(tl.float32) + dk, mask=ok)


@triton.jit
def _pairs_of(i, x0, r, x, T, L, NL, LOW, BLK: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the row and key numbers of a tile of E, and which pairs are in the band."""
    t, s = i * BLK + r[:, None], (i - NL) * BLK + x0 + x[None, :]
    near = (s - t + LOW >= 0) & (s - t + LOW < L)
    if CAUSAL:
        near = near & (s <= t)
    return t, s, near


@triton.jit
def band_pairs(
    W, R, Z, TOP, K_, V, MASK, DE, B, T, D, H, L, NB, NL, LOW, COUNT, GROUPS, e_block, w_batch, w_head, w_row,
    k_batch, k_row, v_batch, v_row,
    CAUSAL: tl.constexpr, BY_ROW: tl.constexpr, SHARED: tl.constexpr, PER_HEAD: tl.constexpr, BASE2: tl.constexpr,
    DROP: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute DE (G, GROUPS, BLK, WIDTH), E * (Z X^T) of COUNT blocks of rows (one, if each has its own weights).

    It is summed over features and a shared batch.
    """
    x0, group, gw = tl.program_id(0) * BLK, tl.program_id(1), tl.program_id(2).to(tl.int64)
    head, first, width = (gw % H).to(tl.int32), gw // H, D // H
    r, n = tl.arange(0, BLK), tl.arange(0, N)
    total = tl.zeros([BLK, BLK], tl.float32)
    for b_ in span(B if SHARED else 1):
        b = first + b_
        for i in span(group * COUNT, tl.minimum(NB, group * COUNT + COUNT)):
            t, s, near = _pairs_of(i, x0, r, r, T, L, NL, LOW, BLK, CAUSAL)
            s_ = (i - NL) * BLK + x0 + r
            for c0 in span(0, width, N):
                c, inside = head * width + c0 + n, c0 + n < width
                at = Z + (b * NB * BLK + t) * (2 * D) + c[None, :]
                zg, zp = tl.load(at, mask=inside[None, :], other=0.0), tl.load(at + D, mask=inside[None, :], other=0.0)
                top = tl.load(TOP + (b * NB + i) * D + c, mask=inside, other=0.0)
                kc = (c * 0 + head if PER_HEAD else c)[:, None]
                ok = inside[:, None] & (s_ >= 0)[None, :]
                k, v, ok = _tile(
                    K_, V, MASK, b, s_[None, :], T, kc, c[:, None], ok, k_batch, k_row, v_batch, v_row, BASE2
                )
                x = tl.where(ok, power(k - top[:, None], BASE2), 0.0)
                total = tl.dot(zg, operand(x * v, Z, DROP), total, input_precision=PRECISION)
                total = tl.dot(zp, operand(x, Z, DROP), total, input_precision=PRECISION)
    t, s, near = _pairs_of(group * COUNT, x0, r, r, T, L, NL, LOW, BLK, CAUSAL)
    if BY_ROW:
        near = near & (t < T) & (s >= 0) & (s < T)
    raw = tl.load(W + first * w_batch + head * w_head + t * w_row + LOW + s - t, mask=near, other=0.0).to(tl.float32)
    top = tl.load(R + (gw * (GROUPS if BY_ROW else 1) + group * e_block) * BLK + r)
    e = tl.where(near & (raw <= CAP), power(units(raw, BASE2) - top[:, None], BASE2), 0.0)
    tl.store(DE + ((gw * GROUPS + group) * BLK + r[:, None]) * WIDTH + x0 + r[None, :], e * total)


@triton.jit
def band_pairs_exact(
    W, K_, V, MASK, G, Q, SAVED, FLAG, DE, B, T, D, H, L, NB, NL, LOW, COUNT, GROUPS, w_batch, w_head, w_row,
    k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row,
    CAUSAL: tl.constexpr, BY_ROW: tl.constexpr, SHARED: tl.constexpr, PER_HEAD: tl.constexpr, BASE2: tl.constexpr,
    WIDTH: tl.constexpr, BLK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add to DE what marked tiles give, term by term."""
    x0, pm, gw = tl.program_id(0) * M, tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, r0 = pm // (BLK // M), pm % (BLK // M) * M
    head, first, width = (gw % H).to(tl.int32), gw // H, D // H
    r = r0 + tl.arange(0, M)
    x = tl.arange(0, M)
    total, marked = tl.zeros([M, M], tl.float32), 0
    for b_ in span(B if SHARED else 1):
        b = first + b_
        for i in span(group * COUNT, tl.minimum(NB, group * COUNT + COUNT)):
            t, s, near = _pairs_of(i, x0, r, x, T, L, NL, LOW, BLK, CAUSAL)
            near = near & (t < T) & (s >= 0) & (s < T)
            at = W + first * w_batch + head * w_head + t * w_row + LOW + s - t
            w = weights(at, near, BASE2)
            near = near & (tl.load(at, mask=near, other=0.0).to(tl.float32) <= CAP)
            for f in span(tl.cdiv(width, N)):
                flag = tl.load(FLAG + ((b * NB + i) * H + head) * tl.cdiv(width, N) + f)
                marked = tl.maximum(marked, flag)
                part = tl.zeros([M, M], tl.float32)
                for c in span(
                    head * width + f * N, tl.where(flag != 0, head * width + tl.minimum(width, f * N + N), 0)
                ):
                    g, y, den, top = _row(G, Q, SAVED, b, t, B, T, D, c, t < T, g_batch, g_row, q_batch, q_row)
                    k, v, ok = _tile(
                        K_, V, MASK, b, s, T, head if PER_HEAD else c, c, s >= 0, k_batch, k_row, v_batch, v_row, BASE2
                    )
                    a = tl.where(near & ok & (den < 0), power(plus(w, k, top, BASE2), BASE2), 0.0)
                    part += a * (g / tl.where(den < 0, -den, 1.0)) * (v - y)
                total += part
    if marked != 0:
        out = DE + ((gw * GROUPS + group) * BLK + r[:, None]) * WIDTH + x0 + x[None, :]
        tl.store(out, tl.load(out) + total)


class _Call:
    """Hold the sizes of a call, its inputs as the kernels take them, and what both passes begin with.

    These are E and the sums over blocks of keys.
    """

    def __init__(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        mask: Tensor | None,
        causal: bool,
        tiles: Tiles | None,
        block: tuple[int, int] | None,
    ):
        self.q, self.k, self.v = None if q is None else rows(q), rows(k), rows(v)
        self.mask, self.bytes, self.causal, t = mask, bytes_of(mask), causal, tiles or BY_DTYPE[v.dtype]
        (self.B, self.T, self.D), self.L = v.shape, w.shape[-1]
        self.per_head = k.shape[-1] != self.D or w.shape[1] > 1
        self.H = k.shape[-1] if self.per_head else 1
        self.w, self.by_row = rows(w.expand(-1, self.H, -1, -1)), w.shape[2] > 1
        self.BLK, self.N = block or BLOCK[v.dtype]
        self.step, self.stages = STEP[v.dtype], STAGES[v.dtype]
        self.NB, self.strips = -(-self.T // self.BLK), self.H * -(-self.D // self.H // self.N)
        self.low = self.L - 1 if causal else self.L // 2
        self.NL, self.NR = -(-self.low // self.BLK), -(-(self.L - 1 - self.low) // self.BLK)
        self.width = (self.NL + 1 + self.NR) * self.BLK
        self.t, self.grid = t, (self.strips, self.NB, self.B)
        self.fixed: Options = {"BASE2": t.base2, "BLK": self.BLK, "N": self.N}
        self.dots: Options = {"DROP": t.drop, "PRECISION": t.precision, "WIDTH": self.width}
        self.near = self.NB, self.NL, self.NR
        self._weights()
        self._keys()

    @property
    def w_strides(self) -> tuple[int, int, int]:
        """Return the strides of batch, head and row of the weights, 0 where they do not vary."""
        return self.w.stride(0) * (self.w.shape[0] > 1), self.w.stride(1), self.w.stride(2) * self.by_row

    @property
    def e_strides(self) -> tuple[int, int, int]:
        """Return the same strides of the tiles of E."""
        return self.H * self.NT * (self.w.shape[0] > 1), self.NT, int(self.by_row)

    def _weights(self) -> None:
        G, self.NT = self.w.shape[0] * self.H, self.NB if self.by_row else 1
        self.R = self.w.new_empty(G, self.NT, self.BLK, dtype=torch.float32)
        self.E = self.w.new_empty(G, self.NT, self.BLK, self.width, dtype=self.t.operand)
        sizes = self.T, self.L, self.H, *self.w_strides, self.NT, self.NL, self.low
        constant = {
            "CAUSAL": self.causal,
            "BY_ROW": self.by_row,
            "BASE2": self.t.base2,
            "DROP": self.t.drop,
            "WIDTH": self.width,
            "BLK": self.BLK,
            "M": 16,
        }
        launch(band_weights, (self.BLK // 16, self.NT, G), self.w, self.E, self.R, *sizes, **constant)

    def _keys(self) -> None:
        self.st, self.past, future = (
            self.v.new_empty(self.B, self.NB, 3, self.D, dtype=torch.float32) for _ in range(3)
        )
        self.future = None if self.causal else future
        sizes = self.T, self.D, self.H, self.NB, *strides(self.k), *strides(self.v)
        launch(block_sums, self.grid, self.k, self.v, self.bytes, self.st, *sizes, PER_HEAD=self.per_head, **self.fixed)
        states, base2 = (self.st, self.past, self.future), self.t.base2
        launch(
            carry, (-(-self.D // 32), self.B), *states, self.NB, self.D, CAUSAL=self.causal, BASE2=base2, N=32, warps=1
        )

    def first(self) -> Tensor | None:
        """Return the first valid key of each row; T where there is none."""
        if self.mask is None:
            return None
        return torch.where(self.mask.any(1), self.mask.to(torch.uint8).argmax(1), self.T).to(torch.int32)

    @property
    def small(self) -> int:
        """Return the tokens of a tile that is summed term by term."""
        return min(16, self.BLK)


def saved_shapes(
    q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, *, causal: bool
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides inputs and output."""
    return [(3, *v.shape)]


def forward(
    q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, *,
    causal: bool, save: bool, tiles: Tiles | None = None, block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute y_t = gate(q_t) * sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts), where w_ts = 0 outside the band.

    Args:
        q, v: (B, T, D), q None for no gate; k: (B, T, D), or (B, T, h) where channel c uses the key of head
            c // (D / h).
        w: log-weights (1 or B, 1 or h, 1 or T, L); entry j of row t belongs to key t + j - (L - 1) when causal,
            t + j - L // 2 otherwise.
        mask: (B, T), True = may be attended.

    Returns:
        (B, T, D), and what the backward pass needs (3, B, T, D), empty unless ``save``.
    """
    c = _Call(q, k, v, w, mask, causal, tiles, block)
    y = v.new_empty(v.shape)
    saved = v.new_empty((3, *v.shape) if save else (0,), dtype=torch.float32)
    flag, kept = v.new_empty(c.B, c.NB, c.strips, dtype=torch.int32), saved if save else None
    strided = *strides(c.k), *strides(c.v), *strides(c.q)
    given = c.k, c.v, c.bytes, c.q, y, kept, flag, c.B, c.T, c.D, c.H
    constant = {"CAUSAL": causal, "PER_HEAD": c.per_head, **c.fixed}
    tensors = c.E, c.R, c.st, c.past, c.future, c.first(), *given
    launch(
        band_rows,
        c.grid,
        *tensors,
        *c.near,
        *c.e_strides,
        *strided,
        warps=8,
        K=min(c.BLK, c.step[0]),
        **constant,
        **c.dots,
    )
    grid = c.strips, -(-c.T // c.small), c.B
    launch(
        band_rows_exact,
        grid,
        c.w,
        c.past,
        c.future,
        *given,
        c.L,
        *c.near,
        c.low,
        *c.w_strides,
        *strided,
        **constant,
        M=c.small,
        warps=8,
    )
    return y, saved


def backward(
    g: Tensor, q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, y: Tensor, saved: Tensor, *,
    causal: bool, tiles: Tiles | None = None, block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq (empty without q), dk, dv, and dw shaped like w; ``saved`` is that of ``forward``, its y unused."""
    c, g = _Call(q, k, v, w, mask, causal, tiles, block), rows(g)
    dq = v.new_empty((0,) if q is None else q.shape)
    z, top, out, flag = _terms(c, g, dq, saved)
    dk = v.new_empty(v.shape, dtype=torch.float32 if c.per_head else v.dtype)
    dv = v.new_empty(v.shape)
    constant = {"PER_HEAD": c.per_head, **c.fixed}
    strided = *strides(c.k), *strides(c.v)
    given = c.T, c.D, c.H, *c.near, *c.e_strides, *strided
    product = constant | c.dots | {"M": min(c.BLK, c.step[0])}
    launch(
        band_keys,
        c.grid,
        c.E,
        z,
        c.st,
        top,
        out,
        c.k,
        c.v,
        c.bytes,
        dk,
        dv,
        *given,
        warps=8,
        registers=c.t.registers,
        **product,
    )
    inputs = c.w, c.k, c.v, c.bytes, g, c.q, saved, flag
    more = *strided, *strides(g), *strides(c.q)
    sizes = c.B, c.T, c.D, c.H, c.L, *c.near, c.low, *c.w_strides, *more
    launch(
        band_keys_exact,
        (c.strips, -(-c.T // c.small), c.B),
        *inputs,
        dk,
        dv,
        *sizes,
        CAUSAL=causal,
        M=c.small,
        warps=8,
        registers=128,
        **constant,
    )
    dw = _band_of(c, _pairs(c, z, top, inputs, more, constant))
    if dw.shape[1] != w.shape[1]:
        dw = dw.sum(1, keepdim=True)
    return dq, dk.unflatten(-1, (c.H, -1)).sum(-1).to(v.dtype) if c.per_head else dk, dv, dw.to(w.dtype)


def _terms(c: _Call, g: Tensor, dq: Tensor, saved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Z, the maxima of the blocks of rows, what blocks of keys get from far rows, and the marks."""
    z = g.new_empty(c.B, c.NB * c.BLK, 2, c.D, dtype=c.t.operand)
    top, u, out = (g.new_empty(c.B, c.NB, n, c.D, dtype=torch.float32) for n in (1, 4, 2))
    flag = g.new_empty(c.B, c.NB, c.strips, dtype=torch.int32)
    tensors = g, c.q, saved, c.st, c.past, c.future, z, None if c.q is None else dq, top, u, flag
    sizes = c.B, c.T, c.D, c.H, *c.near, *strides(g), *strides(c.q)
    launch(band_terms, c.grid, *tensors, *sizes, warps=8, registers=255, CAUSAL=c.causal, DROP=c.t.drop, **c.fixed)
    states = u, c.st, c.past, c.future, out
    launch(
        carry_back,
        (-(-c.D // 32), c.B),
        *states,
        c.NB,
        c.D,
        c.NL,
        c.NR,
        CAUSAL=c.causal,
        BASE2=c.t.base2,
        N=32,
        warps=1,
    )
    return z, top, out, flag


def _pairs(
    c: _Call, z: Tensor, top: Tensor, inputs: tuple[Tensor | None, ...], more: tuple[int, ...], constant: Options
) -> Tensor:
    """Compute the gradient of the log-weights of every tile, (G, groups, BLK, width).

    Groups of blocks of rows are summed where they share their weights.
    """
    count = 1 if c.by_row else -(-c.NB // 16)
    groups, G = -(-c.NB // count), c.R.shape[0]
    de = z.new_empty(G, groups, c.BLK, c.width, dtype=torch.float32)
    sizes = c.B, c.T, c.D, c.H, c.L, c.NB, c.NL, c.low, count, groups
    constant = constant | {"CAUSAL": c.causal, "BY_ROW": c.by_row, "SHARED": c.w.shape[0] == 1}
    given = c.w, c.R, z, top, c.k, c.v, c.bytes, de
    grid, product = (c.width // c.BLK, groups, G), constant | c.dots | {"N": min(c.N, c.step[1])}
    room = 128 if c.v.dtype == torch.float32 else 0  # without a limit ptxas takes 64 and spills
    launch(
        band_pairs,
        grid,
        *given,
        *sizes,
        int(c.by_row),
        *c.w_strides,
        *more[:4],
        warps=8,
        stages=c.stages,
        registers=room,
        **product,
    )
    grid = c.width // 16, groups * (c.BLK // 16), G
    launch(
        band_pairs_exact,
        grid,
        *inputs,
        de,
        *sizes,
        *c.w_strides,
        *more,
        WIDTH=c.width,
        M=16,
        warps=2,
        registers=128,
        **constant,
    )
    return de


def _band_of(c: _Call, de: Tensor) -> Tensor:
    """Cut the band (Bw, H, Tw, L) out of tiles: entry j of row r of a tile is its column r + j + NL BLK - low."""
    G, groups, BLK, width = de.shape
    band = de.as_strided((G, groups, BLK, c.L), (groups * BLK * width, BLK * width, width + 1, 1), c.NL * BLK - c.low)
    band = band.reshape(G, groups * BLK, c.L)[:, : c.T] if c.by_row else band.sum((1, 2))[:, None]
    return band.unflatten(0, (-1, c.H))


def _sample(dtype: torch.dtype, causal: bool, conv: bool, masked: bool, gate: bool, width: int) -> None:
    B, T, D, h = 4, 4096, 512, 8
    q, k, v = (torch.empty(B, T, n, dtype=dtype, device="meta") for n in (D, h if conv else D, D))
    w = torch.empty(1, h if conv else 1, 1 if conv else T, width, dtype=torch.float32, device="meta")
    mask = torch.empty(B, T, dtype=torch.bool, device="meta") if masked else None
    y, saved = forward(q if gate else None, k, v, w, mask, causal=causal, save=True)
    forward(q if gate else None, k, v, w, mask, causal=causal, save=False)
    backward(y, q if gate else None, k, v, w, mask, y, saved, causal=causal)


def samples() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield calls on meta tensors that together launch every configuration."""
    for dtype in BY_DTYPE:
        name = str(dtype).removeprefix("torch.")
        for causal in (True, False):
            what = f"{name} {'causal' if causal else 'all'}"
            yield f"{what} local", partial(_sample, dtype, causal, False, False, True, 32 if causal else 63)
            yield f"{what} conv mask", partial(_sample, dtype, causal, True, True, False, 129)
