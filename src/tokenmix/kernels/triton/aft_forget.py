"""Run AFT-forget in Triton: y_t = gate(q_t) * n_t / z_t, n_t = e^{g_t} n_{t-1} + e^{k_t} v_t, z_t the same without v.

All features are independent. Time is cut into chunks of 64 tokens, as for AFT-simple, in three launches: the sums of
each chunk and its decay; the sums of all chunks before each, joined in float64; the outputs. Sums are kept in units of
e^m, m the largest key so far, which decays with them: with low = m_{t-1} + g_t and d = k_t - low, the old sums are
multiplied by e^min(0, -d) and the new token by e^min(0, d), one of which is 1. m is held in float64, and between
launches as two float32 numbers, so that adding decays to it costs no digits.

Backward: with u_t the gradient of n_t / z_t, and in the same units,
    r_t = u_t / z_t + old_{t+1} r_{t+1},  p_t = u_t y_t / z_t + old_{t+1} p_{t+1},  old_t = e^min(0, -d_t),
    dv_t = e_t r_t,  dk_t = e_t (v_t r_t - p_t),  dg_t = old_t (n_{t-1} r_t - z_{t-1} p_t),  e_t = e^min(0, d_t).
The first launch recomputes d, n and z of each token and leaves them in memory with what each chunk passes to those
before it; the second sums this over later chunks; the third walks each chunk from its last token to its first.
Nothing that is 0 is multiplied by what may not be finite, so a bad token reaches no gradient it has no part in.

Masked tokens weigh nothing and decay nothing. If q is None there is no gate. There is no norm here: with ``heads`` it
is applied to what these kernels return.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._tiles import span
from .aft_simple import CHUNK, DEAD, STRIP, _place, _row, _valid_tokens, rows
from .launch import bytes_of, launch

FLOOR = tl.constexpr(-3.4028e38)  # the maximum of no keys
ABSENT = tl.constexpr(-3.0e38)  # d of a token that weighs nothing: its e is 0
BD, FORWARD_ROWS, BACK_ROWS = 64, 8, 4  # features of a program and tokens of a tile: what fits the registers of a warp


@triton.jit
def _exp_nonpositive(x):
    """Compute e^min(0, x), NaN for NaN."""
    return tl.exp(tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _times(a, b):
    """Compute a * b, and 0 where b is 0 whatever a is."""
    return tl.where(b == 0, 0.0, a * b)


@triton.jit
def _join(m, decay, m2):
    """Return d of what comes after sums of maximum m that decay, and the maximum of both, in float64."""
    low = tl.maximum(m + decay, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return (m2 - low).to(tl.float32), tl.maximum(low, m2, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _take(k, v, g, m, num, den):
    """Pass one token: return d, and the sums after it."""
    d, top = _join(m, g.to(tl.float64), tl.maximum(k, FLOOR, propagate_nan=tl.PropagateNan.ALL).to(tl.float64))
    d = tl.where(k <= DEAD, ABSENT, d)
    old, e = _exp_nonpositive(-d), _exp_nonpositive(d)
    return d, top, num * old + e * v, den * old + e


@triton.jit
def _tile(K, V, G, kt, vt, gt, r, od, ok):
    """Load keys, values and log-decays of a tile in float32; masked tokens have DEAD, 0 and 0 whatever they hold."""
    k = tl.load(K + r * kt + od[None, :], mask=ok, other=DEAD).to(tl.float32)
    v = tl.load(V + r * vt + od[None, :], mask=ok, other=0.0).to(tl.float32)
    g = tl.load(G + r * gt + od[None, :], mask=ok, other=0.0).to(tl.float32)
    lowest = tl.maximum(g, DEAD, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(k, DEAD, propagate_nan=tl.PropagateNan.ALL), v, lowest


@triton.jit
def _store_split(p, D, ok, x):
    """Store float64 numbers as two float32 ones, D elements apart."""
    high = x.to(tl.float32)
    tl.store(p, high, mask=ok)
    tl.store(p + D, (x - high.to(tl.float64)).to(tl.float32), mask=ok)


@triton.jit
def _get(p, D, ok, other):
    return tl.load(p, mask=ok, other=other).to(tl.float64) + tl.load(p + D, mask=ok, other=0.0).to(tl.float64)


@triton.jit
def _load_before(S, b, c, chunks, D, od):
    """Load the sums (m, num, den) before a chunk from S (B, chunks, 4, D)."""
    p, ok = S + (b * chunks + c) * 4 * D + od, od < D
    num, den = tl.load(p + 2 * D, mask=ok, other=0.0), tl.load(p + 3 * D, mask=ok, other=0.0)
    return _get(p, D, ok, FLOOR), num, den


@triton.jit
def totals(
    K, V, G, MASK, TOTAL, T, D, kb, kt, vb, vt, gb, gt, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr
):
    """Compute the sums of each chunk and its decay, TOTAL (B, chunks, 6, D)."""
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    K += b * kb + first * kt
    V += b * vb + first * vt
    G += b * gb + first * gt
    m, decay = tl.full([BD], FLOOR, tl.float64), tl.zeros([BD], tl.float64)
    num, den = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for i in range(0, CHUNK, ROWS):
        ok = _valid_tokens(MASK, b, c * CHUNK + i + rows, T)[:, None] & (od < D)[None, :]
        k, v, g = _tile(K, V, G, kt, vt, gt, (i + rows)[:, None], od, ok)
        for j in tl.static_range(ROWS):
            gg = _row(g, rows, j)
            _, m, num, den = _take(_row(k, rows, j), _row(v, rows, j), gg, m, num, den)
            decay += gg
    p, ok = TOTAL + (b * chunks + c) * 6 * D + od, od < D
    _store_split(p, D, ok, m)
    tl.store(p + 2 * D, num, mask=ok)
    tl.store(p + 3 * D, den, mask=ok)
    _store_split(p + 4 * D, D, ok, tl.maximum(decay, FLOOR, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def carry(TOTAL, BEFORE, chunks, D, BD: tl.constexpr):
    """Join the sums of all chunks before each."""
    b, od = tl.program_id(1).to(tl.int64), tl.program_id(0) * BD + tl.arange(0, BD)
    ok = od < D
    m, num, den = tl.full([BD], FLOOR, tl.float64), tl.zeros([BD], tl.float64), tl.zeros([BD], tl.float64)
    for c in span(0, chunks, 1, num_stages=4):
        p, at = BEFORE + (b * chunks + c) * 4 * D + od, TOTAL + (b * chunks + c) * 6 * D + od
        _store_split(p, D, ok, m)
        tl.store(p + 2 * D, num.to(tl.float32), mask=ok)
        tl.store(p + 3 * D, den.to(tl.float32), mask=ok)
        n2, d2 = tl.load(at + 2 * D, mask=ok, other=0.0), tl.load(at + 3 * D, mask=ok, other=0.0)
        d, m = _join(m, _get(at + 4 * D, D, ok, 0.0), _get(at, D, ok, FLOOR))
        old, e = _exp_nonpositive(-d).to(tl.float64), _exp_nonpositive(d).to(tl.float64)
        num, den = num * old + e * n2.to(tl.float64), den * old + e * d2.to(tl.float64)


@triton.jit
def outputs(
    Q, K, V, G, MASK, BEFORE, Y, T, D, qb, qt, kb, kt, vb, vt, gb, gt,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute y of each chunk from the sums before it."""
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    K += b * kb + first * kt
    V += b * vb + first * vt
    G += b * gb + first * gt
    Y += (b * T + first) * D
    if Q is not None:
        Q += b * qb + first * qt
    m, num, den = _load_before(BEFORE, b, c, chunks, D, od)
    for i in range(0, CHUNK, ROWS):
        t, r = c * CHUNK + i + rows, (i + rows)[:, None]
        inside = (t < T)[:, None] & (od < D)[None, :]
        k, v, g = _tile(K, V, G, kt, vt, gt, r, od, _valid_tokens(MASK, b, t, T)[:, None] & (od < D)[None, :])
        n, z = tl.zeros_like(k), tl.zeros_like(k)
        for j in tl.static_range(ROWS):
            _, m, num, den = _take(_row(k, rows, j), _row(v, rows, j), _row(g, rows, j), m, num, den)
            n = tl.where(rows[:, None] == j, num[None, :], n)
            z = tl.where(rows[:, None] == j, den[None, :], z)
        none = z == 0
        if Q is not None:
            z *= 1.0 + tl.exp(-tl.load(Q + r * qt + od[None, :], mask=inside, other=0.0).to(tl.float32))
        tl.store(Y + r * D + od[None, :], tl.where(none, 0.0, n / z), mask=inside)


@triton.jit
def _load_gradients(U, Q, ut, qt, r, od, inside):
    """Load the gradient of y, that of the ratio, and the gate (1 without q)."""
    g = tl.load(U + r * ut + od[None, :], mask=inside, other=0.0).to(tl.float32)
    s = tl.full(g.shape, 1.0, tl.float32)
    if Q is not None:
        s = tl.sigmoid(tl.load(Q + r * qt + od[None, :], mask=inside, other=0.0).to(tl.float32))
    return g, _times(s, g), s


@triton.jit
def back_replay(
    U, Q, K, V, G, MASK, BEFORE, EACH, HANDED, T, D, ub, ut, qb, qt, kb, kt, vb, vt, gb, gt,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute d, n and z of each token, EACH (B, T, 3, D), and what each chunk passes to those before it.

    HANDED (B, chunks, 3, D) holds old_t r_t and old_t p_t of its first token, without later chunks, and the product of
    its old_t, by which theirs are multiplied.
    """
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    U += b * ub + first * ut
    K += b * kb + first * kt
    V += b * vb + first * vt
    G += b * gb + first * gt
    EACH += (b * T + first) * 3 * D
    if Q is not None:
        Q += b * qb + first * qt
    m, num, den = _load_before(BEFORE, b, c, chunks, D, od)
    open, r, p = tl.full([BD], 1.0, tl.float32), tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for i in range(0, CHUNK, ROWS):
        t, at = c * CHUNK + i + rows, (i + rows)[:, None]
        inside = (t < T)[:, None] & (od < D)[None, :]
        k, v, g = _tile(K, V, G, kt, vt, gt, at, od, _valid_tokens(MASK, b, t, T)[:, None] & (od < D)[None, :])
        _, u, _ = _load_gradients(U, Q, ut, qt, at, od, inside)
        d, n, z = tl.zeros_like(k), tl.zeros_like(k), tl.zeros_like(k)
        for j in tl.static_range(ROWS):
            dd, m, num, den = _take(_row(k, rows, j), _row(v, rows, j), _row(g, rows, j), m, num, den)
            open *= _exp_nonpositive(-dd)
            share = _times(open / tl.where(den == 0, 1.0, den), tl.where(den == 0, 0.0, _row(u, rows, j)))
            r += share
            p += _times(num / tl.where(den == 0, 1.0, den), share)
            here = rows[:, None] == j
            d = tl.where(here, dd[None, :], d)
            n, z = tl.where(here, num[None, :], n), tl.where(here, den[None, :], z)
        e = EACH + at * 3 * D + od[None, :]
        tl.store(e, d, mask=inside)
        tl.store(e + D, n, mask=inside)
        tl.store(e + 2 * D, z, mask=inside)
    h, ok = HANDED + (b * chunks + c) * 3 * D + od, od < D
    tl.store(h, r, mask=ok)
    tl.store(h + D, p, mask=ok)
    tl.store(h + 2 * D, open, mask=ok)


@triton.jit
def back_carry(HANDED, AFTER, chunks, D, BD: tl.constexpr):
    """Compute AFTER (B, chunks, 2, D): what all later chunks pass to each."""
    b, od = tl.program_id(1).to(tl.int64), tl.program_id(0) * BD + tl.arange(0, BD)
    r, p, ok = tl.zeros([BD], tl.float64), tl.zeros([BD], tl.float64), od < D
    for done in span(0, chunks, 1, num_stages=4):
        c = chunks - 1 - done
        at, h = AFTER + (b * chunks + c) * 2 * D + od, HANDED + (b * chunks + c) * 3 * D + od
        tl.store(at, r.to(tl.float32), mask=ok)
        tl.store(at + D, p.to(tl.float32), mask=ok)
        open = tl.load(h + 2 * D, mask=ok, other=0.0).to(tl.float64)
        r = tl.load(h, mask=ok, other=0.0).to(tl.float64) + _times(open, r)
        p = tl.load(h + D, mask=ok, other=0.0).to(tl.float64) + _times(open, p)


@triton.jit
def gradients(
    U, Q, V, MASK, BEFORE, EACH, AFTER, DQ, DK, DV, DG, T, D, ub, ut, qb, qt, vb, vt,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute dq, dk, dv and dg of each chunk, from its last token to its first."""
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    U += b * ub + first * ut
    V += b * vb + first * vt
    EACH += (b * T + first) * 3 * D
    DK += (b * T + first) * D
    DV += (b * T + first) * D
    DG += (b * T + first) * D
    if Q is not None:
        Q += b * qb + first * qt
        DQ += (b * T + first) * D
    AFTER += (b * chunks + c) * 2 * D + od
    r, p = tl.load(AFTER, mask=od < D, other=0.0), tl.load(AFTER + D, mask=od < D, other=0.0)
    _, num0, den0 = _load_before(BEFORE, b, c, chunks, D, od)
    for back in range(0, CHUNK, ROWS):
        i = CHUNK - ROWS - back
        t, at = c * CHUNK + i + rows, (i + rows)[:, None]
        inside = (t < T)[:, None] & (od < D)[None, :]
        ok = _valid_tokens(MASK, b, t, T)[:, None] & (od < D)[None, :]
        g, u, s = _load_gradients(U, Q, ut, qt, at, od, inside)
        v = tl.load(V + at * vt + od[None, :], mask=ok, other=0.0).to(tl.float32)
        e = EACH + at * 3 * D + od[None, :]
        d = tl.load(e, mask=inside, other=ABSENT)
        n, z = tl.load(e + D, mask=inside, other=0.0), tl.load(e + 2 * D, mask=inside, other=0.0)
        inner = inside & (at > 0)
        n1 = tl.where(at > 0, tl.load(e - 2 * D, mask=inner, other=0.0), num0[None, :])
        z1 = tl.where(at > 0, tl.load(e - D, mask=inner, other=0.0), den0[None, :])
        none = z == 0
        y = tl.where(none, 0.0, n / tl.where(none, 1.0, z))
        share = _times(1.0 / tl.where(none, 1.0, z), tl.where(none, 0.0, u))
        rs, ps = tl.zeros_like(y), tl.zeros_like(y)
        for j in tl.static_range(ROWS):
            k = ROWS - 1 - j
            new = _row(share, rows, k)
            r += new
            p += _times(_row(y, rows, k), new)
            rs = tl.where(rows[:, None] == k, r[None, :], rs)
            ps = tl.where(rows[:, None] == k, p[None, :], ps)
            old = _exp_nonpositive(-_row(d, rows, k))
            r, p = _times(old, r), _times(old, p)
        e, old = _exp_nonpositive(d), _exp_nonpositive(-d)
        place = at * D + od[None, :]
        if Q is not None:
            tl.store(DQ + place, _times(y * s * (1.0 - s), g), mask=inside)
        tl.store(DV + place, tl.where(ok, _times(e, rs), 0.0), mask=inside)
        tl.store(DK + place, tl.where(ok, _times(e, _times(v, rs) - ps), 0.0), mask=inside)
        tl.store(DG + place, tl.where(ok, _times(old, _times(n1, rs) - _times(z1, ps)), 0.0), mask=inside)


def saved_shapes(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, mask: Tensor | None, *, heads: int, eps: float
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides its inputs."""
    B, T, D = k.shape
    return [(B, -(-T // CHUNK), 4, D)]


def _steps(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(n for a in tensors for n in ((0, 0) if a is None else a.stride()[:2]))


def _grid(k: Tensor) -> tuple[int]:
    """Return the grid with one program for each chunk of time and strip of features of (B, T, D)."""
    return (k.shape[0] * -(-k.shape[1] // CHUNK) * -(-k.shape[2] // BD),)


def _empty_float32(k: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=k.device)


def forward(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, mask: Tensor | None, *, heads: int, eps: float, save: bool
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D), and the tensor saved for backward (empty unless ``save``); ``heads`` must be 0: no norm."""
    q, k, v, g, mask = None if q is None else rows(q), rows(k), rows(v), rows(g), bytes_of(mask)
    B, T, D = k.shape
    chunks = -(-T // CHUNK)
    y = torch.empty(B, T, D, dtype=k.dtype, device=k.device)
    total, before = _empty_float32(k, B, chunks, 6, D), _empty_float32(k, B, chunks, 4, D)
    fixed = {"CHUNK": CHUNK, "ROWS": FORWARD_ROWS, "BD": BD, "warps": 1}
    launch(totals, _grid(k), k, v, g, mask, total, T, D, *_steps(k, v, g), **fixed)
    launch(carry, (-(-D // STRIP), B), total, before, chunks, D, BD=STRIP, warps=1)
    launch(outputs, _grid(k), q, k, v, g, mask, before, y, T, D, *_steps(q, k, v, g), **fixed)
    return y, before if save else before.new_empty(0)


def backward(
    u: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    mask: Tensor | None,
    saved: Tensor,
    *,
    heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq (empty without q), dk, dv, dg."""
    u, q, k, v, g, mask = rows(u), None if q is None else rows(q), rows(k), rows(v), rows(g), bytes_of(mask)
    B, T, D = k.shape
    dk, dv, dg = (torch.empty(B, T, D, dtype=k.dtype, device=k.device) for _ in range(3))
    dq = torch.empty((0,) if q is None else (B, T, D), dtype=k.dtype, device=k.device)
    chunks = saved.shape[1]
    each, handed, after = (
        _empty_float32(k, B, T, 3, D),
        _empty_float32(k, B, chunks, 3, D),
        _empty_float32(k, B, chunks, 2, D),
    )
    fixed = {"CHUNK": CHUNK, "ROWS": BACK_ROWS, "BD": BD, "warps": 1}
    launch(back_replay, _grid(k), u, q, k, v, g, mask, saved, each, handed, T, D, *_steps(u, q, k, v, g), **fixed)
    launch(back_carry, (-(-D // STRIP), B), handed, after, chunks, D, BD=STRIP, warps=1)
    gate = None if q is None else dq
    strides = _steps(u, q, v)
    launch(
        gradients, _grid(k), u, q, v, mask, saved, each, after, gate, dk, dv, dg, T, D, *strides, registers=128, **fixed
    )
    return dq, dk, dv, dg


def samples() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls on meta tensors that reach every configuration."""
    for dtype, D, T in itertools.product((torch.float32, torch.bfloat16, torch.float16), (64, 512), (256, 4096)):
        for gate, mask in itertools.product((True, False), (False, True)):
            x = torch.empty(2, T, D, dtype=dtype, device="meta")
            flags = torch.empty(2, T, dtype=torch.bool, device="meta") if mask else None
            label = f"{str(dtype)[6:]} D={D}{' gate' * gate}{' mask' * mask}"
            yield label, partial(_sample, x if gate else None, x, flags)


def benchmark(B: int, T: int, D: int, heads: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the forms at the benchmark's shape, causal and in bfloat16, as calls on meta tensors."""
    x = torch.empty(B, T, D, dtype=torch.bfloat16, device="meta")
    yield "aft_forget", partial(_sample, x, x, None)


def _sample(q: Tensor | None, x: Tensor, mask: Tensor | None) -> None:
    saved = forward(q, x, x, x, mask, heads=0, eps=1e-6, save=True)[1]
    backward(x, q, x, x, x, mask, saved, heads=0, eps=1e-6)


EXCEPTIONS = dict.fromkeys(
    ("totals", "outputs", "back_replay", "gradients"),
    {"wide": "a thread owns whole columns, two features in bfloat16, so that sums along time stay in its registers"},
)
