"""Run AFT-local and AFT-conv in one dimension in Triton, on the tensor cores: log-weights inside a band, 0 outside.

Time is cut into blocks. The rows of block i meet the near keys, those of blocks j = i - NL .. i + NR, block by block as
a matrix product; all other keys have the weight exp(0) and enter as sums over whole blocks, before and after:

    [num | den] = sum_j e^{m_j - M_i} E_ij X_j + e^{-r} (past + future)
    E_ts = e^{w_ts - r_t},  X_s = [e^{k_s - m_j} v_s | e^{k_s - m_j}]

r_t is the largest log-weight of a row, m_j the largest key of each feature in block j, and M_i that of all blocks that
block i meets, all rounded up to whole numbers. Only positive terms are added. X is written once, in the type that is
multiplied. E of a band that is the same for all rows (a convolution) is one tile per head.

If a denominator comes out below 2^-60, a term that counts may have been lost to underflow: its tile is marked, and a
kernel of few programs that look for marks computes it again under the maximum of every row and feature. Such
denominators are saved with a minus sign, and their part of the gradients is summed term by term too.

Backward: Z_t = [g_t / D_t | -g_t y_t / D_t], with y before the gate in float32; near keys get E^T Z, far ones
the sums of Z over whole blocks of rows, in units that only ever grow, so that every factor is at most 1; with X again,
dv = X_den G and dk = X_num G + X_den P. dw is the band of E * (Z X^T). The order of sums is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
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
    PROGRAMS,
    Numbers,
    is_marked,
    key,
    load_marks,
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
from .launch import bytes_of, launch

BLOCK = {
    torch.bfloat16: (64, 64),
    torch.float16: (64, 64),
    torch.float32: (32, 64),
}  # tokens of a block, features of a tile
# tokens, and features of a gradient of weights, multiplied at once
STEP = {torch.bfloat16: (64, 64), torch.float16: (32, 16), torch.float32: (16, 16)}
WARPS = {torch.bfloat16: 4, torch.float16: 8, torch.float32: 8}  # of a product
# loads ahead of a step of the gradient of weights, which cost registers
STAGES = {torch.bfloat16: 3, torch.float16: 2, torch.float32: 1}


@triton.jit
def _features(strip, HW: tl.constexpr, N: tl.constexpr):
    """Return the features of a strip, all in one head of HW: the head, their numbers, and which exist."""
    head, c = strip // tl.cdiv(HW, N), strip % tl.cdiv(HW, N) * N + tl.arange(0, N)
    return head, head * HW + c, c < HW


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
    v = tl.load(V + b * v_batch + s * v_row + c, mask=ok, other=0.0).to(tl.float32)  # under a mask that is known
    return k, tl.where(live, v, 0.0), ok & live


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
    K_, V, MASK, ST, X, T, D, NB, k_batch, k_row, v_batch, v_row,
    PER_HEAD: tl.constexpr, HW: tl.constexpr, BASE2: tl.constexpr, DROP: tl.constexpr, BLK: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Compute the triple (m, num, den) of each block of keys, ST (B, NB, 3, D), and X (B, NB BLK, 2, D)."""
    head, c, inside = _features(tl.program_id(0), HW, N)
    i, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kc = (c * 0 + head if PER_HEAD else c)[None, :]
    s = i * BLK + tl.arange(0, BLK)
    k, v, ok = _tile(
        K_, V, MASK, b, s[:, None], T, kc, c[None, :], inside[None, :], k_batch, k_row, v_batch, v_row, BASE2
    )
    m = tl.ceil(tl.max(tl.where(ok, k, NONE), 0))
    e = tl.where(ok, power(k - m[None, :], BASE2), 0.0)
    _keep(ST, b, i, NB, D, c, inside, m, tl.sum(e * v, 0), tl.sum(e, 0))
    at = X + (b * NB * BLK + s[:, None]) * (2 * D) + c[None, :]
    tl.store(at, operand(e * v, X, DROP), mask=inside[None, :])
    tl.store(at + D, operand(e, X, DROP), mask=inside[None, :])


@triton.jit
def _terms(X, b, first, rows, NB, D, c, inside, BLK: tl.constexpr):
    """Load both halves of X or Z (B, NB BLK, 2, D): rows after ``first``, features c."""
    at = X + (b * NB * BLK + first) * (2 * D) + (rows[:, None] * (2 * D) + c[None, :])
    return tl.load(at, mask=inside[None, :], other=0.0), tl.load(at + D, mask=inside[None, :], other=0.0)


@triton.jit
def _largest(ST, b, i, NB, D, c, inside):
    """Load the largest key of block i, or that of no keys where there is no such block."""
    block = i + c * 0
    return tl.load(ST + (b * NB + i) * 3 * D + c, mask=inside & (block >= 0) & (block < NB), other=NONE)


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
    top = _largest(PAST, b, i - NL, NB, D, c, inside)
    if not CAUSAL:
        top = tl.maximum(top, _largest(FUTURE, b, i + NR, NB, D, c, inside))
    for j in span(i - NL, i + NR + 1):
        top = tl.maximum(top, _largest(ST, b, j, NB, D, c, inside))
    return top


@triton.jit
def band_rows(
    E, R, X, ST, PAST, FUTURE, FIRST, Q, Y, Y0, DEN, FLAG, T, D, NB, NL, NR, e_batch, e_head, e_block, q_batch, q_row,
    CAUSAL: tl.constexpr, HW: tl.constexpr, BASE2: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr,
    BLK: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows; Y0 and DEN (B, T, D) receive y before the gate and the denominators."""
    head, c, inside = _features(tl.program_id(0), HW, N)
    i, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r, x = tl.arange(0, BLK), tl.arange(0, K)
    e_tile = b * e_batch + head * e_head + i * e_block
    top = _maximum(ST, PAST, FUTURE, b, i, NB, D, c, inside, NL, NR, CAUSAL)
    m, n, d = _triple(PAST, b, i - NL, NB, D, c, inside)
    far_num, far_den = n * power(m - top, BASE2), d * power(m - top, BASE2)
    if not CAUSAL:
        m, n, d = _triple(FUTURE, b, i + NR, NB, D, c, inside)
        far_num, far_den = far_num + n * power(m - top, BASE2), far_den + d * power(m - top, BASE2)
    low = power(-tl.load(R + e_tile * BLK + r), BASE2)[:, None]
    num, den = low * far_num[None, :], low * far_den[None, :]
    e_at = E + (e_tile * BLK + r[:, None]) * WIDTH + x[None, :]
    for part in span(tl.maximum(0, i - NL) * (BLK // K), tl.minimum(NB, i + NR + 1) * (BLK // K)):
        j, row = part // (BLK // K), part % (BLK // K) * K
        scale = power(_largest(ST, b, j, NB, D, c, inside) - top, BASE2)[None, :]
        e = tl.load(e_at + (j - i + NL) * BLK + row)
        xn, xd = _terms(X, b, j * BLK + row, x, NB, D, c, inside, BLK)
        num += tl.dot(e, xn, input_precision=PRECISION) * scale
        den += tl.dot(e, xd, input_precision=PRECISION) * scale
    t = i * BLK + r
    ok = (t < T)[:, None] & inside[None, :]
    some = ok
    if FIRST is not None:
        first = tl.load(FIRST + b)
        some = ok & (t[:, None] >= first if CAUSAL else first < T)
    lost = tl.max(tl.max((some & (den < LIMIT)).to(tl.int32), 1), 0)
    tl.store(FLAG + (b * NB + i) * tl.num_programs(0) + tl.program_id(0), lost)
    y = num / tl.where(den > 0, den, 1.0)
    at = (b * T + t[:, None]) * D + c[None, :]
    if DEN is not None:
        tl.store(Y0 + at, y, mask=ok)
        tl.store(DEN + at, den, mask=ok)
    if Q is not None:
        y = y * sigmoid(tl.load(Q + b * q_batch + t[:, None] * q_row + c[None, :], mask=ok, other=0.0).to(tl.float32))
    tl.store(Y + at, y, mask=ok)


@triton.jit
def _place(one, strips, NB, PARTS: tl.constexpr):
    """Return what a number of a tile term by term stands for: its part of a block, its strip, its block, its row."""
    part, tile = one % PARTS, one // PARTS
    return part, tile % strips, tile // strips % NB, (tile // strips // NB).to(tl.int64)


@triton.jit
def band_rows_exact(
    W, PAST, FUTURE, K_, V, MASK, Q, Y, Y0, DEN, TOP, FLAG, B, T, D, L, NB, NL, NR, LOW, strips, w_batch, w_head, w_row,
    k_batch, k_row, v_batch, v_row, q_batch, q_row,
    CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, HW: tl.constexpr, BASE2: tl.constexpr, BLK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Look for marked tiles and recompute them, every row and feature under its own maximum.

    If Y is None, compute only these maxima, TOP (B, T, D).
    """
    PARTS: tl.constexpr = BLK // M
    total = B * NB * strips * PARTS
    for start in span(0, total, tl.num_programs(0) * LOOK):
        marks = load_marks(FLAG, start, total, PARTS, LOOK)
        for n in span(tl.where(tl.max(marks, 0) != 0, LOOK, 0)):
            if is_marked(marks, n, LOOK):
                part, strip, i, b = _place(tile_of(start, n), strips, NB, PARTS)
                _tile_exact(
                    W, PAST, FUTURE, K_, V, MASK, Q, Y, Y0, DEN, TOP, b, i, part, strip, T, D, L, NB, NL, NR, LOW,
                    w_batch, w_head, w_row, k_batch, k_row, v_batch, v_row, q_batch, q_row,
                    CAUSAL, PER_HEAD, HW, BASE2, BLK, M, N,
                )  # fmt: skip


@triton.jit
def _tile_exact(
    W, PAST, FUTURE, K_, V, MASK, Q, Y, Y0, DEN, TOP, b, i, part, strip, T, D, L, NB, NL, NR, LOW,
    w_batch, w_head, w_row, k_batch, k_row, v_batch, v_row, q_batch, q_row,
    CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, HW: tl.constexpr, BASE2: tl.constexpr, BLK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute M rows of block i term by term."""
    head, c, inside = _features(strip, HW, N)
    first = i * BLK + part * M
    t = first + tl.arange(0, M)
    w_at = W + b * w_batch + head * w_head + t * w_row + LOW - t
    kc = (c * 0 + head if PER_HEAD else c)[None, :]
    one, zero = tl.arange(0, 1)[:, None], tl.zeros([M, N], tl.float32)
    past, past_num, past_den = _triple(PAST, b, i - NL, NB, D, c, inside)
    far, far_num, far_den = past, past_num, past_den
    if not CAUSAL:
        far, far_num, far_den = _triple(FUTURE, b, i + NR, NB, D, c, inside)
    start, end = tl.maximum(0, (i - NL) * BLK), tl.minimum(T, (i + NR + 1) * BLK)
    if CAUSAL:
        end = tl.minimum(end, first + M)
    top = tl.maximum(past, far)[None, :] + zero
    for s in span(start, end):
        k, _, ok = _tile(
            K_, V, MASK, b, s + one, T, kc, c[None, :], inside[None, :], k_batch, k_row, v_batch, v_row, BASE2
        )
        w = weights(w_at + s, (t < T) & (s - t + LOW >= 0) & (s - t + LOW < L), BASE2)[:, None]
        if CAUSAL:
            ok = ok & (s <= t)[:, None]
        top = tl.maximum(top, tl.where(ok, w + k, NONE))
    here = (t < T)[:, None] & inside[None, :]
    at = (b * T + t[:, None]) * D + c[None, :]
    if Y is None:
        tl.store(TOP + at, top, mask=here)
    else:
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
        y = num / tl.where(den > 0, den, 1.0)
        if DEN is not None:
            tl.store(Y0 + at, y, mask=here)
            tl.store(DEN + at, -den, mask=here)
        if Q is not None:
            q = tl.load(Q + b * q_batch + t[:, None] * q_row + c[None, :], mask=here, other=0.0)
            y = y * sigmoid(q.to(tl.float32))
        tl.store(Y + at, y, mask=here)


@triton.jit
def _row(G, Q, Y, DEN, b, t, T, D, c, ok, g_batch, g_row, q_batch, q_row):
    """Load what rows give to the backward pass: g times the gate, y before the gate, the signed denominator, dq."""
    at = (b * T + t) * D + c
    y, den = tl.load(Y + at, mask=ok, other=0.0), tl.load(DEN + at, mask=ok, other=0.0)
    g = tl.load(G + b * g_batch + t * g_row + c, mask=ok, other=0.0).to(tl.float32)
    dq = g
    if Q is not None:
        q = tl.load(Q + b * q_batch + t * q_row + c, mask=ok, other=0.0).to(tl.float32)
        g = g * sigmoid(q)
        dq = g * y * sigmoid(-q)
    return g, y, den, dq


@triton.jit
def band_terms(
    G, Q, Y, DEN, TOP, R, ST, PAST, FUTURE, Z, DQ, MOST, U, T, D, NB, NL, NR, e_batch, e_head, e_block,
    g_batch, g_row, q_batch, q_row,
    CAUSAL: tl.constexpr, HW: tl.constexpr, BASE2: tl.constexpr, DROP: tl.constexpr, BLK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute Z (B, NB BLK, 2, D), zero where the sums were taken term by term, and the gate's gradient.

    Also compute MOST (B, NB, D), the largest key that each block of rows meets, and U (B, NB, 4, D), what a block of
    rows gives to keys far before and far after it.
    """
    head, c, inside = _features(tl.program_id(0), HW, N)
    i, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    most = _maximum(ST, PAST, FUTURE, b, i, NB, D, c, inside, NL, NR, CAUSAL)
    tl.store(MOST + (b * NB + i) * D + c, most, mask=inside)
    past = _largest(PAST, b, i - NL, NB, D, c, inside)
    future = past
    if not CAUSAL:
        future = _largest(FUTURE, b, i + NR, NB, D, c, inside)
    before_g, before_p = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    after_g, after_p = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    for r0 in range(0, BLK, M):
        r = r0 + tl.arange(0, M)
        t = i * BLK + r
        ok = (t < T)[:, None] & inside[None, :]
        g, y, den, dq = _row(G, Q, Y, DEN, b, t[:, None], T, D, c[None, :], ok, g_batch, g_row, q_batch, q_row)
        at = (b * T + t[:, None]) * D + c[None, :]
        if Q is not None:
            tl.store(DQ + at, dq, mask=ok)
        z = tl.where(den != 0, g / tl.where(den != 0, tl.abs(den), 1.0), 0.0)
        near = tl.where(den > 0, z, 0.0)
        out = Z + (b * NB * BLK + t[:, None]) * (2 * D) + c[None, :]
        tl.store(out, operand(near, Z, DROP), mask=inside[None, :])
        tl.store(out + D, operand(-near * y, Z, DROP), mask=inside[None, :])
        top = tl.load(R + (b * e_batch + head * e_head + i * e_block) * BLK + r)[:, None] + most[None, :]
        top = tl.where(den < 0, tl.load(TOP + at, mask=ok & (den < 0), other=0.0), top)
        far = tl.where(ok, power(past[None, :] - top, BASE2), 0.0) * z
        before_g, before_p = before_g + tl.sum(far, 0), before_p - tl.sum(far * y, 0)
        if not CAUSAL:
            far = tl.where(ok, power(future[None, :] - top, BASE2), 0.0) * z
            after_g, after_p = after_g + tl.sum(far, 0), after_p - tl.sum(far * y, 0)
    out = U + (b * NB + i) * 4 * D + c
    tl.store(out, before_g, mask=inside)
    tl.store(out + D, before_p, mask=inside)
    if not CAUSAL:
        tl.store(out + 2 * D, after_g, mask=inside)
        tl.store(out + 3 * D, after_p, mask=inside)


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
    E, Z, X, ST, MOST, OUT, DK, DV, T, D, NB, NL, NR, e_batch, e_head, e_block,
    HW: tl.constexpr, BASE2: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLK: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute dk (feature by feature) and dv of a block of keys, from M rows at once."""
    head, c, inside = _features(tl.program_id(0), HW, N)
    j, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    s, row = tl.arange(0, BLK), tl.arange(0, M)
    own = _largest(ST, b, j, NB, D, c, inside)
    out = OUT + (b * NB + j) * 2 * D + c
    zero = tl.zeros([BLK, N], tl.float32)
    G = zero + tl.load(out, mask=inside, other=0.0)[None, :]
    P = zero + tl.load(out + D, mask=inside, other=0.0)[None, :]
    for part in span(tl.maximum(0, j - NR) * (BLK // M), tl.minimum(NB, j + NL + 1) * (BLK // M)):
        i, r = part // (BLK // M), part % (BLK // M) * M
        most = tl.load(MOST + (b * NB + i) * D + c, mask=inside, other=0.0)
        scale = power(own - most, BASE2)[None, :]
        zg, zp = _terms(Z, b, i * BLK + r, row, NB, D, c, inside, BLK)
        tile = (b * e_batch + head * e_head + i * e_block) * BLK + r
        e = tl.load(E + (tile + row[None, :]) * WIDTH + (j - i + NL) * BLK + s[:, None])
        G += tl.dot(e, zg, input_precision=PRECISION) * scale
        P += tl.dot(e, zp, input_precision=PRECISION) * scale
    xn, xd = _terms(X, b, j * BLK, s, NB, D, c, inside, BLK)
    xn, xd = xn.to(tl.float32), xd.to(tl.float32)
    at = (b * T + j * BLK) * D + (s[:, None] * D + c[None, :])
    ok = (j * BLK + s < T)[:, None] & inside[None, :]
    tl.store(DV + at, xd * G, mask=ok)
    tl.store(DK + at, xn * G + xd * P, mask=ok)


@triton.jit
def band_keys_exact(
    W, K_, V, MASK, G, Q, Y, DEN, TOP, FLAG, DK, DV, B, T, D, L, NB, NL, NR, LOW, strips, w_batch, w_head, w_row,
    k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row,
    CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, HW: tl.constexpr, BASE2: tl.constexpr, BLK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Look for blocks of keys near marked tiles, and add to dk and dv what the rows of these give, term by term."""
    PARTS: tl.constexpr = BLK // M
    total = B * NB * strips * PARTS
    for start in span(0, total, tl.num_programs(0) * LOOK):
        at = tile_of(start, tl.arange(0, LOOK))
        _, strips_of, blocks, batch = _place(at, strips, NB, PARTS)
        marks = tl.zeros([LOOK], tl.float32)
        for d in span(NL + NR + 1):
            i = blocks - NR + d
            p = FLAG + (batch * NB + i) * strips + strips_of
            marks = tl.maximum(marks, tl.load(p, mask=(at < total) & (i >= 0) & (i < NB), other=0))
        for n in span(tl.where(tl.max(marks, 0) != 0, LOOK, 0)):
            if is_marked(marks, n, LOOK):
                part, strip, j, b = _place(tile_of(start, n), strips, NB, PARTS)
                _keys_exact(
                    W, K_, V, MASK, G, Q, Y, DEN, TOP, FLAG, DK, DV, b, j, part, strip, T, D, L, NB, NL, NR, LOW,
                    strips, w_batch, w_head, w_row, k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row,
                    CAUSAL, PER_HEAD, HW, BASE2, BLK, M, N,
                )  # fmt: skip


@triton.jit
def _keys_exact(
    W, K_, V, MASK, G, Q, Y, DEN, TOP, FLAG, DK, DV, b, j, part, strip, T, D, L, NB, NL, NR, LOW, strips,
    w_batch, w_head, w_row, k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row,
    CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, HW: tl.constexpr, BASE2: tl.constexpr, BLK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv of M keys of block j."""
    head, c, inside = _features(strip, HW, N)
    s = j * BLK + part * M + tl.arange(0, M)
    kc = (c * 0 + head if PER_HEAD else c)[None, :]
    k, v, ok = _tile(
        K_, V, MASK, b, s[:, None], T, kc, c[None, :], inside[None, :], k_batch, k_row, v_batch, v_row, BASE2
    )
    dk, dv = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    one = tl.arange(0, 1)[:, None]
    for i in span(tl.maximum(0, j - NR), tl.minimum(NB, j + NL + 1)):
        flag = tl.load(FLAG + (b * NB + i) * strips + strip)
        for t in span(i * BLK, tl.where(flag != 0, tl.minimum(T, i * BLK + BLK), 0)):
            g, y, den, _ = _row(
                G, Q, Y, DEN, b, t + one, T, D, c[None, :], inside[None, :], g_batch, g_row, q_batch, q_row
            )
            top = tl.load(TOP + (b * T + t) * D + c[None, :], mask=inside[None, :] & (den < 0), other=3.0e38)
            near = (s < T) & (s - t + LOW >= 0) & (s - t + LOW < L)
            w = weights(W + b * w_batch + head * w_head + t * w_row + LOW + s - t, near, BASE2)[:, None]
            pair = ok & (den < 0)
            if CAUSAL:
                pair = pair & (s <= t)[:, None]
            a = tl.where(pair, power(plus(w, k, top, BASE2), BASE2), 0.0) * (g / tl.where(den < 0, -den, 1.0))
            dv += a
            dk += a * (v - y)
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
    W, R, Z, X, ST, MOST, DE, B, T, D, H, L, NB, NL, LOW, COUNT, GROUPS, EACH, e_block, w_batch, w_head, w_row,
    CAUSAL: tl.constexpr, BY_ROW: tl.constexpr, HW: tl.constexpr, BASE2: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, BLK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute E * (Z X^T) of COUNT blocks of rows (one, if each has its own weights), summed over features.

    DE (shares, G, GROUPS, BLK, WIDTH) is summed over EACH rows of the batch, which share their weights.
    """
    x0, group = tl.program_id(0) * BLK, tl.program_id(1) % GROUPS
    share, gw = tl.program_id(1) // GROUPS, tl.program_id(2).to(tl.int64)
    head, first = (gw % H).to(tl.int32), gw // H
    r, n = tl.arange(0, BLK), tl.arange(0, N)
    total = tl.zeros([BLK, BLK], tl.float32)
    for b_ in span(share * EACH, tl.minimum(B, share * EACH + EACH)):
        b = first + b_
        for i in span(group * COUNT, tl.minimum(NB, group * COUNT + COUNT)):
            j = i - NL + x0 // BLK
            for c0 in span(0, tl.where((j >= 0) & (j < NB), HW, 0), N):
                c, inside = head * HW + c0 + n, c0 + n < HW
                zg, zp = _terms(Z, b, i * BLK, r, NB, D, c, inside, BLK)
                xn, xd = _terms(X, b, j * BLK, r, NB, D, c, inside, BLK)
                most = tl.load(MOST + (b * NB + i) * D + c, mask=inside, other=0.0)
                scale = power(_largest(ST, b, j, NB, D, c, inside) - most, BASE2)[None, :]
                zg, zp = operand(zg.to(tl.float32) * scale, Z, DROP), operand(zp.to(tl.float32) * scale, Z, DROP)
                total = tl.dot(zg, tl.trans(xn), total, input_precision=PRECISION)
                total = tl.dot(zp, tl.trans(xd), total, input_precision=PRECISION)
    t, s, near = _pairs_of(group * COUNT, x0, r, r, T, L, NL, LOW, BLK, CAUSAL)
    if BY_ROW:
        near = near & (t < T) & (s >= 0) & (s < T)
    raw = tl.load(W + first * w_batch + head * w_head + t * w_row + LOW + s - t, mask=near, other=0.0).to(tl.float32)
    top = tl.load(R + (gw * (GROUPS if BY_ROW else 1) + group * e_block) * BLK + r)
    e = tl.where(near & (raw <= CAP), power(units(raw, BASE2) - top[:, None], BASE2), 0.0)
    tile = (share * tl.num_programs(2) + gw) * GROUPS + group
    tl.store(DE + (tile * BLK + r[:, None]) * WIDTH + x0 + r[None, :], e * total)


@triton.jit
def band_pairs_exact(
    W, K_, V, MASK, G, Q, Y, DEN, TOP, FLAG, MARKS, DE, B, T, D, H, L, NB, NL, LOW, COUNT, GROUPS, heads,
    w_batch, w_head, w_row, k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row,
    CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, HW: tl.constexpr, BASE2: tl.constexpr, WIDTH: tl.constexpr,
    BLK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Look for marked tiles of weights, MARKS (heads = G, GROUPS), and add to DE what they give, term by term."""
    PARTS: tl.constexpr = (BLK // M) * (WIDTH // M)
    total = heads * GROUPS * PARTS
    for start in span(0, total, tl.num_programs(0) * LOOK):
        marks = load_marks(MARKS, start, total, PARTS, LOOK)
        for n in span(tl.where(tl.max(marks, 0) != 0, LOOK, 0)):
            if is_marked(marks, n, LOOK):
                one = tile_of(start, n)
                r0, x0 = one % PARTS // (WIDTH // M) * M, one % (WIDTH // M) * M
                _pairs_exact(
                    W, K_, V, MASK, G, Q, Y, DEN, TOP, FLAG, DE, r0, x0, one // PARTS % GROUPS,
                    (one // PARTS // GROUPS).to(tl.int64), B, T, D, H, L, NB, NL, LOW, COUNT, GROUPS,
                    w_batch, w_head, w_row, k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row,
                    CAUSAL, PER_HEAD, HW, BASE2, WIDTH, BLK, M, N,
                )  # fmt: skip


@triton.jit
def _pairs_exact(
    W, K_, V, MASK, G, Q, Y, DEN, TOP, FLAG, DE, r0, x0, group, gw, B, T, D, H, L, NB, NL, LOW, COUNT, GROUPS,
    w_batch, w_head, w_row, k_batch, k_row, v_batch, v_row, g_batch, g_row, q_batch, q_row,
    CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, HW: tl.constexpr, BASE2: tl.constexpr, WIDTH: tl.constexpr,
    BLK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add M x M weights' terms."""
    head, first = (gw % H).to(tl.int32), gw // H
    r, x = r0 + tl.arange(0, M), tl.arange(0, M)
    total = tl.zeros([M, M], tl.float32)
    for b_ in span(B):
        b = first + b_
        for i in span(group * COUNT, tl.minimum(NB, group * COUNT + COUNT)):
            t, s, near = _pairs_of(i, x0, r, x, T, L, NL, LOW, BLK, CAUSAL)
            near = near & (t < T) & (s >= 0) & (s < T)
            at = W + first * w_batch + head * w_head + t * w_row + LOW + s - t
            w = weights(at, near, BASE2)
            near = near & (tl.load(at, mask=near, other=0.0).to(tl.float32) <= CAP)
            for f in span(tl.cdiv(HW, N)):
                flag = tl.load(FLAG + ((b * NB + i) * H + head) * tl.cdiv(HW, N) + f)
                part = tl.zeros([M, M], tl.float32)
                for c in span(head * HW + f * N, tl.where(flag != 0, head * HW + tl.minimum(HW, f * N + N), 0)):
                    g, y, den, _ = _row(G, Q, Y, DEN, b, t, T, D, c, t < T, g_batch, g_row, q_batch, q_row)
                    top = tl.load(TOP + (b * T + t) * D + c, mask=(t < T) & (den < 0), other=3.0e38)
                    k, v, ok = _tile(
                        K_, V, MASK, b, s, T, head if PER_HEAD else c, c, s >= 0, k_batch, k_row, v_batch, v_row, BASE2
                    )
                    a = tl.where(near & ok & (den < 0), power(plus(w, k, top, BASE2), BASE2), 0.0)
                    part += a * (g / tl.where(den < 0, -den, 1.0)) * (v - y)
                total += part
    out = DE + ((gw * GROUPS + group) * BLK + r[:, None]) * WIDTH + x0 + x[None, :]
    tl.store(out, tl.load(out) + total)


class _Call:
    """Hold the sizes of a call, its inputs as the kernels take them, and what both passes begin with.

    These are E and, unless ``saved`` holds them, the sums over blocks of keys and X.
    """

    def __init__(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        mask: Tensor | None,
        causal: bool,
        numbers: Numbers | None,
        block: tuple[int, int] | None,
        saved: Tensor | None = None,
        save: bool = True,
    ):
        self.q, self.k, self.v = None if q is None else rows(q), rows(k), rows(v)
        self.mask, self.bytes, self.causal, t = mask, bytes_of(mask), causal, numbers or BY_DTYPE[v.dtype]
        (self.B, self.T, self.D), self.L = v.shape, w.shape[-1]
        self.per_head = k.shape[-1] != self.D or w.shape[1] > 1
        self.H = _heads(k, v, w)
        self.w, self.by_row = rows(w.expand(-1, self.H, -1, -1)), w.shape[2] > 1
        self.BLK, self.N = block or BLOCK[v.dtype]
        self.step, self.stages, self.warps = STEP[v.dtype], STAGES[v.dtype], WARPS[v.dtype]
        self.HW = self.D // self.H
        self.NB, self.strips = -(-self.T // self.BLK), _strips(k, v, w, self.N)
        self.low = self.L - 1 if causal else self.L // 2
        self.NL, self.NR = -(-self.low // self.BLK), -(-(self.L - 1 - self.low) // self.BLK)
        self.width = (self.NL + 1 + self.NR) * self.BLK
        self.t, self.grid = t, (self.strips, self.NB, self.B)
        self.fixed: Options = {"HW": self.HW, "BASE2": t.base2, "BLK": self.BLK, "N": self.N}
        self.dots: Options = {"PRECISION": t.precision, "WIDTH": self.width}
        self.dots |= {"flops": 4.0 * self.B * self.T * self.width * self.D}
        self.near = self.NB, self.NL, self.NR
        sizes = _sizes(k, v, w, causal, t, (self.BLK, self.N))
        sizes[:2] = (n * save for n in sizes[:2])
        self.saved = v.new_empty(sum(sizes), dtype=torch.float32) if saved is None else saved
        parts = self.saved.split(sizes)
        of_blocks = (self.B, self.NB, 3, self.D)
        self.y0, self.den = (self._part(a, v.shape) if save else None for a in parts[:2])
        self.flag = self._part(parts[2], (self.B, self.NB, self.strips))
        self.st, self.past = (self._part(a, of_blocks) for a in parts[3:5])
        self.future = None if causal else self._part(parts[5], of_blocks)
        self.x = self._part(parts[6].view(t.operand), (self.B, self.NB * self.BLK, 2, self.D))
        self._weights()
        if saved is None:
            self._keys()

    @staticmethod
    def _part(a: Tensor, shape: tuple[int, ...]) -> Tensor:
        return a[: prod(shape)].view(shape)

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
        sizes = self.T, self.D, self.NB, *strides(self.k), *strides(self.v)
        tensors = self.k, self.v, self.bytes, self.st, self.x
        launch(block_sums, self.grid, *tensors, *sizes, PER_HEAD=self.per_head, DROP=self.t.drop, **self.fixed)
        states, base2 = (self.st, self.past, self.future), self.t.base2
        launch(
            carry, (-(-self.D // 32), self.B), *states, self.NB, self.D, CAUSAL=self.causal, BASE2=base2, N=32, warps=1
        )

    def exact(self, q: Tensor | None, y: Tensor | None, top: Tensor | None) -> None:
        """Compute the marked tiles term by term; without y only their maxima."""
        tensors = self.w, self.past, self.future, self.k, self.v, self.bytes, q, y, self.y0, self.den, top, self.flag
        sizes = self.B, self.T, self.D, self.L, *self.near, self.low, self.strips, *self.w_strides
        launch(
            band_rows_exact, self.marks_grid, *tensors, *sizes, *self.strides(q),
            CAUSAL=self.causal, **self.single,
        )  # fmt: skip

    @property
    def marks_grid(self) -> tuple[int]:
        """Return the grid of a kernel that looks for marked rows or keys."""
        return marks_grid(self.flag.numel() * (self.BLK // self.small))

    def strides(self, *more: Tensor | None) -> tuple[int, ...]:
        """Return the strides of keys, values, and more tensors."""
        return tuple(n for a in (self.k, self.v, *more) for n in strides(a))

    @property
    def single(self) -> Options:
        """Return what the kernels that sum rows and keys term by term take."""
        return {"PER_HEAD": self.per_head, "M": self.small, "LOOK": LOOK, "registers": 128, "warps": 8, **self.fixed}

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
    """Return the shape of the tensor saved for the backward pass besides inputs and output, one vector."""
    return [(sum(_sizes(k, v, w, causal, BY_DTYPE[v.dtype], BLOCK[v.dtype])),)]


def _sizes(k: Tensor, v: Tensor, w: Tensor, causal: bool, t: Numbers, block: tuple[int, int]) -> list[int]:
    """Return how many float32 hold y, denominators, marks, sums of blocks, of those before and after each, and X."""
    (B, T, D), (BLK, N) = v.shape, block
    NB, strips = -(-T // BLK), _strips(k, v, w, N)
    sums, x = 3 * B * NB * D, B * NB * BLK * 2 * D * t.operand.itemsize // 4
    return [round_up(n, 32) for n in (B * T * D, B * T * D, B * NB * strips, sums, sums, 0 if causal else sums, x)]


def _strips(k: Tensor, v: Tensor, w: Tensor, N: int) -> int:
    """Return the number of strips of N features, each in one head."""
    heads = _heads(k, v, w)
    return heads * -(-v.shape[2] // heads // N)


def _heads(k: Tensor, v: Tensor, w: Tensor) -> int:
    """Return the heads that have keys or weights of their own."""
    return k.shape[-1] if k.shape[-1] != v.shape[-1] or w.shape[1] > 1 else 1


def forward(
    q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, *,
    causal: bool, save: bool, numbers: Numbers | None = None, block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute y_t = gate(q_t) * sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts), where w_ts = 0 outside the band.

    Args:
        q, v: (B, T, D), q None for no gate; k: (B, T, D), or (B, T, h) where channel c uses the key of head
            c // (D / h).
        w: log-weights (1 or B, 1 or h, 1 or T, L); entry j of row t belongs to key t + j - (L - 1) when causal,
            t + j - L // 2 otherwise.
        mask: (B, T), True = may be attended.

    Returns:
        (B, T, D), and a vector of what the backward pass needs: y before the gate, signed denominators, marks of
        tiles, sums of blocks and X; empty unless ``save``.
    """
    c = _Call(q, k, v, w, mask, causal, numbers, block, save=save)
    y = v.new_empty(v.shape)
    tensors = c.E, c.R, c.x, c.st, c.past, c.future, c.first(), c.q, y, c.y0, c.den, c.flag
    sizes = c.T, c.D, *c.near, *c.e_strides, *strides(c.q)
    constant = c.fixed | c.dots | {"CAUSAL": causal, "K": min(c.BLK, c.step[0])}
    launch(band_rows, c.grid, *tensors, *sizes, warps=c.warps, **constant)
    c.exact(c.q, y, None)
    return y, c.saved if save else c.saved.new_empty(0)


def backward(
    g: Tensor, q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, y: Tensor, saved: Tensor, *,
    causal: bool, numbers: Numbers | None = None, block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq (empty without q), dk, dv, and dw shaped like w; ``saved`` is that of ``forward``, its y unused."""
    c, g = _Call(q, k, v, w, mask, causal, numbers, block, saved), rows(g)
    b = _Backward(c, g)
    dk = v.new_empty(v.shape, dtype=torch.float32 if c.per_head else v.dtype)
    dv = v.new_empty(v.shape)
    sizes: tuple[int, ...] = c.T, c.D, *c.near, *c.e_strides
    product = c.fixed | c.dots | {"M": min(c.BLK, c.step[0]), "registers": c.t.registers}
    launch(band_keys, c.grid, c.E, b.z, c.x, c.st, b.most, b.out, dk, dv, *sizes, warps=c.warps, **product)
    sizes = c.B, c.T, c.D, c.L, *c.near, c.low, c.strips, *c.w_strides
    more = c.strides(g, c.q)
    launch(band_keys_exact, c.marks_grid, *b.inputs, dk, dv, *sizes, *more, CAUSAL=causal, **c.single)
    dw = _band_of(c, b.pairs())
    if dw.shape[1] != w.shape[1]:
        dw = dw.sum(1, keepdim=True)
    return b.dq, dk.unflatten(-1, (c.H, -1)).sum(-1).to(v.dtype) if c.per_head else dk, dv, dw.to(w.dtype)


class _Backward:
    """Hold what rows give to the backward pass of a call: Z, the far sums, the maxima of marked tiles."""

    def __init__(self, c: _Call, g: Tensor):
        self.c, self.g, self.z = c, g, torch.empty_like(c.x)
        self.dq = g.new_empty((0,) if c.q is None else g.shape)
        self.most, u, self.out = (g.new_empty(c.B, c.NB, n, c.D, dtype=torch.float32) for n in (1, 4, 2))
        top = g.new_empty(g.shape, dtype=torch.float32)  # touched only where sums were taken term by term
        self.inputs = c.w, c.k, c.v, c.bytes, g, c.q, c.y0, c.den, top, c.flag
        c.exact(None, None, top)
        dq = None if c.q is None else self.dq
        tensors = g, c.q, c.y0, c.den, top, c.R, c.st, c.past, c.future, self.z, dq, self.most
        sizes = c.T, c.D, *c.near, *c.e_strides, *strides(g), *strides(c.q)
        more = c.fixed | {"CAUSAL": c.causal, "DROP": c.t.drop, "M": 16, "warps": 4}
        launch(band_terms, c.grid, *tensors, u, *sizes, **more)
        joined = c.NB, c.D, c.NL, c.NR
        more = {"CAUSAL": c.causal, "BASE2": c.t.base2, "N": 32, "warps": 1}
        launch(carry_back, (-(-c.D // 32), c.B), u, c.st, c.past, c.future, self.out, *joined, **more)

    def pairs(self) -> Tensor:
        """Compute the gradient of the log-weights of every tile, (G, groups, BLK, width).

        Groups of blocks of rows are summed where they share their weights, and so is the batch, in shares.
        """
        c = self.c
        count = 1 if c.by_row else -(-c.NB // 16)
        groups, G, tiles = -(-c.NB // count), c.R.shape[0], c.width // c.BLK
        batch = c.B if c.w.shape[0] == 1 else 1
        each = -(-batch // min(batch, -(-PROGRAMS // (tiles * groups * G))))
        shares = -(-batch // each)
        de = self.z.new_empty(shares, G, groups, c.BLK, c.width, dtype=torch.float32)
        constant = c.fixed | {"CAUSAL": c.causal}
        product = constant | c.dots | {"BY_ROW": c.by_row, "DROP": c.t.drop, "N": min(c.N, c.step[1])}
        sizes = c.T, c.D, c.H, c.L, c.NB, c.NL, c.low, count, groups
        room = 128 if c.v.dtype == torch.float32 else 0  # without a limit ptxas takes 64 and spills
        given = c.w, c.R, self.z, c.x, c.st, self.most, de
        launch(
            band_pairs, (tiles, groups * shares, G), *given, batch, *sizes, each, int(c.by_row), *c.w_strides,
            warps=c.warps, stages=c.stages, registers=room, **product,
        )  # fmt: skip
        de = de.sum(0)
        marks = F.pad(c.flag.view(c.B, c.NB, c.H, -1).amax(3), (0, 0, 0, groups * count - c.NB))
        marks = marks.amax(0, keepdim=True) if batch == c.B else marks
        marks = marks.unflatten(1, (groups, count)).amax(2).mT.contiguous()
        parts = c.BLK // 16 * (c.width // 16)
        launch(
            band_pairs_exact, marks_grid(marks.numel() * parts), *self.inputs, marks, de, batch, *sizes, G,
            *c.w_strides, *c.strides(self.g, c.q), PER_HEAD=c.per_head, WIDTH=c.width, M=16, LOOK=LOOK, warps=2,
            registers=128, **constant,
        )  # fmt: skip
        return de


def _band_of(c: _Call, de: Tensor) -> Tensor:
    """Cut the band (Bw, H, Tw, L) out of tiles: entry j of row r of a tile is its column r + j + NL BLK - low."""
    G, groups, BLK, width = de.shape
    band = de.as_strided((G, groups, BLK, c.L), (groups * BLK * width, BLK * width, width + 1, 1), c.NL * BLK - c.low)
    band = band.reshape(G, groups * BLK, c.L)[:, : c.T] if c.by_row else band.sum((1, 2))[:, None]
    return band.unflatten(0, (-1, c.H))


def _sample(dtype: torch.dtype, causal: bool, conv: bool, masked: bool, gate: bool, width: int) -> None:
    B, T, D, h = 4, 4096, 512, 8
    q, k = (torch.empty(B, T, n, dtype=dtype, device="meta") for n in (D, h if conv else D))
    w = torch.empty(1, h if conv else 1, 1 if conv else T, width, dtype=torch.float32, device="meta")
    mask = torch.empty(B, T, dtype=torch.bool, device="meta") if masked else None
    forward(q if gate else None, k, q, w, mask, causal=causal, save=False)
    _both(q if gate else None, k, q, w, mask, causal)


def _both(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, causal: bool) -> None:
    y, saved = forward(q, k, v, w, mask, causal=causal, save=True)
    backward(y, q, k, v, w, mask, y, saved, causal=causal)


def benchmark(B: int, T: int, D: int, heads: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the forms at the benchmark's shape, causal and in bfloat16, as calls on meta tensors."""
    x, window = torch.empty(B, T, D, dtype=torch.bfloat16, device="meta"), 128
    yield "aft_local", partial(_both, x, x, x, x.new_empty(1, 1, T, window), None, True)
    k, w = x.new_empty(B, T, heads), x.new_empty(1, heads, 1, window + 1)
    yield "aft_conv", partial(_both, x, k, x, w, None, True)


def samples() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield calls on meta tensors that together launch every configuration."""
    for dtype in BY_DTYPE:
        name = str(dtype).removeprefix("torch.")
        for causal in (True, False):
            what = f"{name} {'causal' if causal else 'all'}"
            yield f"{what} local", partial(_sample, dtype, causal, False, False, True, 32 if causal else 63)
            yield f"{what} conv mask", partial(_sample, dtype, causal, True, True, False, 129)


IDLE = {"band_terms": ("TOP",)}
EXCEPTIONS = {
    "band_weights": dict.fromkeys(("wide", "grid"), "1 MB of log-weights, once for the whole batch"),
}
