"""AFT-simple in Triton: y_t = gate(q_t) * sum_s e^{k_s} v_s / sum_s e^{k_s}, feature by feature, over s <= t or over all s.

Causal: time is cut into chunks of 64 tokens. Three launches: the triple (m, num, den) of each chunk, m its largest key; the triples of all chunks
before each; the outputs. A program owns a chunk and a strip of features, walks the chunk in tiles of 8 tokens, and each thread holds whole columns of a
tile, so that sums along time need no exchange. A tile whose keys stay within 60 above the running maximum is summed under one maximum, with one
exponential per key; any other takes the recurrence row by row, which is exact for any finite keys. Sums restart from the chunk's triple, and
the triples are joined in float64, so long sums do not drift.

Backward: with a_t = e^{k_t} / D_t and b_t = D_{t-1} / D_t, both at most 1,
    r_t = g_t + b_{t+1} r_{t+1},  p_t = g_t y_t + b_{t+1} p_{t+1},  dv_t = a_t r_t,  dk_t = a_t (v_t r_t - p_t),
again in three launches: what each chunk hands to those before it, the sums of that over later chunks, the gradients. The first launch also notes
the triple at the start of each tile, for the last to walk the tiles backwards.

Packed sequences: ``start`` marks the first token of each; the sums start anew there. Where q is None there is no gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import bytes_of, launch

CHUNK = 64  # tokens between two saved triples
ROWS = 8  # tokens in a tile
SAFE = tl.constexpr(60.0)  # a tile's keys may lie this far above the running maximum and still share one
FLOOR = tl.constexpr(-(2.0 - 2.0**-22) * 2.0**127)  # the least maximum: finite, so that no difference is NaN
DEAD = tl.constexpr(-(2.0 - 2.0**-23) * 2.0**127)  # the key of a masked token: e^(DEAD - FLOOR) is 0


@triton.jit
def _place(T, D, CHUNK: tl.constexpr, BD: tl.constexpr):
    """What a program works on: its row of the batch, its chunk, the number of chunks, its features."""
    strips, chunks = tl.cdiv(D, BD), tl.cdiv(T, CHUNK)
    i = tl.program_id(0)
    return (i // strips // chunks).to(tl.int64), i // strips % chunks, chunks, i % strips * BD + tl.arange(0, BD)


@triton.jit
def _alive(MASK, b, t, T):
    """Which of these tokens may be attended."""
    ok = t < T
    if MASK is not None:
        ok = ok & (tl.load(MASK + b * T + t, mask=ok, other=0) != 0)
    return ok


@triton.jit
def _keys(K, V, at_k, at_v, ok):
    """Keys and values of a tile in float32; masked ones are DEAD and 0 whatever they hold."""
    k = tl.load(K + at_k, mask=ok, other=DEAD).to(tl.float32)
    return tl.maximum(k, DEAD), tl.load(V + at_v, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _triple(S, b, c, chunks, D, od):
    """Load a triple (m, num, den) of S (B, chunks, 3, D)."""
    p = S + (b * chunks + c) * 3 * D + od
    return tl.load(p, mask=od < D, other=FLOOR), tl.load(p + D, mask=od < D, other=0.0), tl.load(p + 2 * D, mask=od < D, other=0.0)


@triton.jit
def _keep(S, b, c, chunks, D, od, m, num, den):
    p = S + (b * chunks + c) * 3 * D + od
    tl.store(p, m, mask=od < D)
    tl.store(p + D, num, mask=od < D)
    tl.store(p + 2 * D, den, mask=od < D)


@triton.jit
def _row(x, rows, i):
    """Row i of a tile of finite numbers."""
    return tl.sum(tl.where(rows[:, None] == i, x, 0.0), 0)


@triton.jit
def _over(a, b):
    """a / b, and 0 where b is 0."""
    return tl.where(b > 0, a / tl.where(b > 0, b, 1.0), 0.0)


@triton.jit
def _starts(START, b, t, T):
    return tl.load(START + b * T + t, mask=t < T, other=0).to(tl.int32)


@triton.jit
def totals(K, V, MASK, START, TOTAL, T, D, kb, kt, vb, vt, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """The triple of each chunk; with START, of what follows its last start."""
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows = tl.arange(0, ROWS)
    K += b * kb + c.to(tl.int64) * CHUNK * kt
    V += b * vb + c.to(tl.int64) * CHUNK * vt
    m, num, den = tl.full([BD], FLOOR, tl.float32), tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for i in range(0, CHUNK, ROWS):
        t = c * CHUNK + i + rows
        ok = _alive(MASK, b, t, T)
        if START is not None:
            last = tl.max(tl.where(_starts(START, b, t, T) != 0, rows, -1), 0)
            ok = ok & (rows >= last)
            m = tl.where(last >= 0, FLOOR, m)
            num, den = tl.where(last >= 0, 0.0, num), tl.where(last >= 0, 0.0, den)
        k, v = _keys(K, V, (i + rows)[:, None] * kt + od[None, :], (i + rows)[:, None] * vt + od[None, :], ok[:, None] & (od < D)[None, :])
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
def _join_anew(f1, m1, n1, d1, f2, m2, n2, d2):
    """Join, where f2 says that the second starts anew."""
    m, n, d = _join(tl.where(f2 != 0, FLOOR, m1), tl.where(f2 != 0, 0.0, n1), tl.where(f2 != 0, 0.0, d1), m2, n2, d2)
    return f1 | f2, m, n, d


@triton.jit
def carry(TOTAL, FRESH, BEFORE, chunks, D, ROWS: tl.constexpr, BD: tl.constexpr):
    """The triple of all chunks before each; FRESH (B, chunks) marks chunks in which a sequence starts."""
    b = tl.program_id(1).to(tl.int64)
    od, rows = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, ROWS)
    m, num, den = tl.full([BD], FLOOR, tl.float32), tl.zeros([BD], tl.float64), tl.zeros([BD], tl.float64)
    _keep(BEFORE, b, 0, chunks, D, od, m, num, den)
    for i in range(0, chunks, ROWS):
        c = i + rows
        ok = (c < chunks)[:, None] & (od < D)[None, :]
        p = (b * chunks + c)[:, None] * 3 * D + od[None, :]
        m2 = tl.load(TOTAL + p, mask=ok, other=FLOOR)
        n2, d2 = tl.load(TOTAL + p + D, mask=ok, other=0.0), tl.load(TOTAL + p + 2 * D, mask=ok, other=0.0)
        if FRESH is not None:
            fresh = tl.load(FRESH + b * chunks + c, mask=c < chunks, other=0).to(tl.int32)[:, None] + tl.zeros([ROWS, BD], tl.int32)
            fresh, m2, n2, d2 = tl.associative_scan((fresh, m2, n2, d2), 0, _join_anew)
            m1 = tl.where(fresh != 0, FLOOR, m[None, :])
            n1, d1 = tl.where(fresh != 0, 0.0, num[None, :]), tl.where(fresh != 0, 0.0, den[None, :])
        else:
            m2, n2, d2 = tl.associative_scan((m2, n2, d2), 0, _join)
            m1, n1, d1 = m[None, :], num[None, :], den[None, :]
        top = tl.maximum(m1, m2)
        old, new = tl.exp(m1 - top).to(tl.float64), tl.exp(m2 - top).to(tl.float64)
        n2, d2 = n1 * old + n2.to(tl.float64) * new, d1 * old + d2.to(tl.float64) * new
        p += 3 * D  # the next chunk's
        ok = ok & (c + 1 < chunks)[:, None]
        tl.store(BEFORE + p, top, mask=ok)
        tl.store(BEFORE + p + D, n2.to(tl.float32), mask=ok)
        tl.store(BEFORE + p + 2 * D, d2.to(tl.float32), mask=ok)
        m, num, den = tl.max(tl.where((rows == ROWS - 1)[:, None], top, FLOOR), 0), _row(n2, rows, ROWS - 1), _row(d2, rows, ROWS - 1)


@triton.jit
def _anew(starts, rows, i, m, num, den):
    """The triple before row i, dropped if a sequence starts there."""
    fresh = tl.sum(tl.where(rows == i, starts, 0), 0) != 0
    return tl.where(fresh, FLOOR, m), tl.where(fresh, 0.0, num), tl.where(fresh, 0.0, den)


@triton.jit
def _sums(k, v, starts, anew, rows, m, num, den, ROWS: tl.constexpr):
    """Sums along a tile after the triple (m, num, den): y and the triple after it."""
    top = tl.maximum(m, tl.max(k, 0))
    if (tl.max(top - m, 0) < SAFE) & (anew == 0):
        e, old = tl.exp(k - top[None, :]), tl.exp(m - top)
        n, d = tl.cumsum(e * v, 0) + (num * old)[None, :], tl.cumsum(e, 0) + (den * old)[None, :]
        num, den, m = _row(n, rows, ROWS - 1), _row(d, rows, ROWS - 1), top
    else:
        n, d = tl.zeros_like(k), tl.zeros_like(k)
        for i in range(ROWS):
            m, num, den = _anew(starts, rows, i, m, num, den)
            kk, vv = _row(k, rows, i), _row(v, rows, i)
            m, num, den = _join(m, num, den, tl.maximum(kk, FLOOR), vv, tl.where(kk > DEAD, 1.0, 0.0))
            n, d = tl.where(rows[:, None] == i, num[None, :], n), tl.where(rows[:, None] == i, den[None, :], d)
    return n, d, m, num, den


@triton.jit
def outputs(Q, K, V, MASK, START, BEFORE, Y, T, D, qb, qt, kb, kt, vb, vt, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """y of each chunk, from the triple before it."""
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
        k, v = _keys(K, V, r * kt + od[None, :], r * vt + od[None, :], _alive(MASK, b, t, T)[:, None] & (od < D)[None, :])
        if Q is not None:
            gate = 1.0 + tl.exp(-tl.load(Q + r * qt + od[None, :], mask=inside, other=0.0).to(tl.float32))
        n, d, m, num, den = _sums(k, v, starts, tl.max(starts, 0), rows, m, num, den, ROWS)
        some = d > 0
        if Q is not None:
            d *= gate
        tl.store(Y + r * D + od[None, :], tl.where(some, n / d, 0.0), mask=inside)


def samples() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that reach every configuration, on meta tensors."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for D in (64, 512):
            for gate in (True, False):
                for mask in (False, True):
                    x = torch.empty(2, 256, D, dtype=dtype, device="meta")
                    m = torch.empty(2, 256, dtype=torch.bool, device="meta") if mask else None
                    yield f"causal {dtype} D={D} gate={gate} mask={mask}".replace("torch.", ""), partial(forward, x if gate else None, x, x, m, 256, causal=True, save=True)


def saved_shape(k: Tensor, causal: bool) -> tuple[int, ...]:
    """The shape of what the backward pass needs besides its inputs."""
    B, S, D = k.shape
    return (B, -(-S // CHUNK), 3, D) if causal else (B, 1, 3, D)


def _width(dtype: torch.dtype, D: int) -> int:
    """Features of a strip: 16 bytes of each row to each of the 32 threads."""
    return 64 if D <= 64 else 512 // dtype.itemsize


def rows(a: Tensor) -> Tensor:
    return a if a.stride(-1) == 1 else a.contiguous()


def forward(q, k, v, mask, T, *, causal, save, start=None):
    q, k, v = None if q is None else rows(q), rows(k), rows(v)
    B, S, D = k.shape
    mask = bytes_of(mask)
    BD = _width(k.dtype, D)
    chunks = -(-S // CHUNK)
    total = torch.empty(B, chunks, 3, D, dtype=torch.float32, device=k.device)
    before = torch.empty_like(total)
    y = torch.empty(B, T, D, dtype=k.dtype, device=k.device)
    grid = (B * chunks * -(-D // BD),)
    launch(totals, grid, k, v, mask, start, total, S, D, *k.stride()[:2], *v.stride()[:2], CHUNK=CHUNK, ROWS=ROWS, BD=BD, warps=1)
    launch(carry, (-(-D // 32), B), total, None, before, chunks, D, ROWS=32, BD=32)
    qs = (0, 0) if q is None else q.stride()[:2]
    launch(outputs, grid, q, k, v, mask, start, before, y, S, D, *qs, *k.stride()[:2], *v.stride()[:2], CHUNK=CHUNK, ROWS=ROWS, BD=BD, warps=1)
    return y, before
