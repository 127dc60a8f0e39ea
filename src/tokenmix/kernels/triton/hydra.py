"""Run Hydra attention in Triton: y_t = q^_t * sum_s k^_s * v_s, feature by feature, over s <= t or over all s.

q^ and k^ are the rows themselves or x / sqrt(|x|^2 + eps), where the norm over all features is computed by a separate
launch. Causal sums go by chunks of 64 tokens: the sum of each chunk, the sums of all chunks before each (in float64),
then the outputs; a thread holds whole columns of a tile.

Backward, with h_t = scale_t g_t:  dq^_t = h_t * S_t,  dv_s = k^_s * R_s,  dk^_s = v_s * R_s,  where R_s is the sum of
h_t * q^_t over the queries that see s, and dx = r (dx^ - x^ (x^ . dx^)) with r = 1 / sqrt(|x|^2 + eps). With a norm, a
first launch computes x^ . dx^, a second the gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...types import Options
from ..counts import mean_scale
from ._tiles import span
from .aft_simple import CHUNK, _empty_as, _grid, _place, _suffix, _valid_tokens, rows
from .launch import bytes_of, launch

ROWS = 8  # tokens in a tile


@triton.jit
def norms(X, MASK, OUT, T, D, xb, xt, eps, ROWS: tl.constexpr, BD: tl.constexpr):
    """Compute OUT (2, B, T) with x^ = x * OUT[0] * OUT[1].

    There are two factors because the square of a norm may be too large or too small for float32.
    """
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = _valid_tokens(MASK, b, t, T)
    one, down, up = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for c in span(0, D, BD):
        od = c + tl.arange(0, BD)
        x = tl.load(
            X + b * xb + t.to(tl.int64)[:, None] * xt + od[None, :], mask=ok[:, None] & (od < D)[None, :], other=0.0
        ).to(tl.float32)
        small, large = x * 2.0**-64, x * 2.0**64
        one += tl.sum(x * x, 1)
        down += tl.sum(small * small, 1)
        up += tl.sum(large * large, 1)
    long, short = ~(one < 1e36), (one < 1e-20) & (eps < 1e-20)
    unit = tl.where(long, 2.0**-64, tl.where(short, 2.0**64, 1.0))
    square = tl.where(long, down, tl.where(short, up + eps * 2.0**64 * 2.0**64, one + eps))
    some = square > 0
    p = OUT + b * T + t
    tl.store(p, tl.where(ok, unit, 0.0), mask=t < T)
    tl.store(
        p + tl.num_programs(1).to(tl.int64) * T,
        tl.where(ok & some, 1.0 / tl.sqrt(tl.where(some, square, 1.0)), 0.0),
        mask=t < T,
    )


@triton.jit
def _factors(N, b, t, n, T):
    """Load the two factors of these rows, out of (2, n)."""
    return tl.load(N + b * T + t, mask=t < T, other=0.0), tl.load(N + n + b * T + t, mask=t < T, other=0.0)


@triton.jit
def _load_scaled(X, N, at, ok, b, t, n, T):
    """Load x^ of a tile in float32; zeros where not ok."""
    x = tl.load(X + at, mask=ok, other=0.0).to(tl.float32)
    if N is not None:
        unit, r = _factors(N, b, t, n, T)
        x = x * unit[:, None] * r[:, None]
    return x


@triton.jit
def _times(x, SCALE, b, t, T):
    """Multiply the rows of a tile by SCALE (B, T)."""
    if SCALE is not None:
        x *= tl.load(SCALE + b * T + t, mask=t < T, other=0.0)[:, None]
    return x


@triton.jit
def sums(
    X, NX, Y, SCALE, MASK, TOTAL, T, D, n, xb, xt, yb, yt, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr
):
    """Compute TOTAL (B, chunks, D), the sum of x^ * y over each chunk."""
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    X += b * xb + first * xt
    Y += b * yb + first * yt
    total = tl.zeros([BD], tl.float32)
    for i in range(0, CHUNK, ROWS):
        t, at = c * CHUNK + i + rows, (i + rows)[:, None]
        ok = _valid_tokens(MASK, b, t, T)[:, None] & (od < D)[None, :]
        y = tl.load(Y + at * yt + od[None, :], mask=ok, other=0.0).to(tl.float32)
        total += tl.sum(_load_scaled(X, NX, at * xt + od[None, :], ok, b, t, n, T) * _times(y, SCALE, b, t, T), 0)
    tl.store(TOTAL + (b * chunks + c) * D + od, total, mask=od < D)


@triton.jit
def _project(dx, x, N, DOT, b, t, n, T):
    """Compute dx from dx^, x^ and x^ . dx^."""
    unit, r = _factors(N, b, t, n, T)
    return (dx - x * tl.load(DOT + b * T + t, mask=t < T, other=0.0)[:, None]) * unit[:, None] * r[:, None]


@triton.jit
def read(
    G, Q, NQ, K, NK, V, SCALE, MASK, SUM, DOT, OUT, T, D, n, gb, gt, qb, qt, kb, kt, vb, vt,
    CAUSAL: tl.constexpr, DOTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute q^ * S without G, and dq with it; with DOTS, its product with q^ over a strip, OUT (strips, B, T).

    SUM (B, chunks or 1, D) is the sum before each chunk, or over all keys.
    """
    b, c, chunks, od = _place(T, D, CHUNK, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    if CAUSAL:
        K += b * kb + first * kt
        V += b * vb + first * vt
        SUM += (b * chunks + c) * D
    else:
        SUM += b * D
    before = tl.load(SUM + od, mask=od < D, other=0.0)
    for i in range(0, CHUNK, ROWS):
        t, at = c * CHUNK + i + rows, (i + rows)[:, None]
        inside = (t < T)[:, None] & (od < D)[None, :]
        s = before[None, :] + tl.zeros([ROWS, BD], tl.float32)
        if CAUSAL:
            ok = _valid_tokens(MASK, b, t, T)[:, None] & (od < D)[None, :]
            kv = _load_scaled(K, NK, at * kt + od[None, :], ok, b, t, n, T) * tl.load(
                V + at * vt + od[None, :], mask=ok, other=0.0
            ).to(tl.float32)
            s += tl.cumsum(kv, 0)
            before += tl.sum(kv, 0)
        s = _times(s, SCALE, b, t, T)
        if G is None or NQ is not None:
            q = _load_scaled(Q + b * qb + first * qt, NQ, at * qt + od[None, :], inside, b, t, n, T)
        if G is None:
            s *= q
        else:
            s *= tl.load(G + b * gb + first * gt + at * gt + od[None, :], mask=inside, other=0.0).to(tl.float32)
        if DOTS:
            strip = tl.program_id(0) % tl.cdiv(D, BD)
            tl.store(OUT + strip.to(tl.int64) * n + b * T + t, tl.sum(s * q, 1), mask=t < T)
        else:
            if DOT is not None:
                s = _project(s, q, NQ, DOT, b, t, n, T)
            tl.store(OUT + (b * T + first + at) * D + od[None, :], s, mask=inside)


@triton.jit
def back_keys(
    G, Q, NQ, K, NK, V, SCALE, MASK, REST, DOT, DK, DV, S, D, n, gb, gt, qb, qt, kb, kt, vb, vt,
    CAUSAL: tl.constexpr, DOTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv, or with DOTS k^ . dk^ over a strip in DK (strips, B, S).

    REST (B, chunks or 1, D) is the sum of h * q^ after each chunk, or over all queries.
    """
    b, c, chunks, od = _place(S, D, CHUNK, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    K += b * kb + first * kt
    V += b * vb + first * vt
    if CAUSAL:
        G += b * gb + first * gt
        Q += b * qb + first * qt
        REST += (b * chunks + c) * D
    else:
        REST += b * D
    rest = tl.load(REST + od, mask=od < D, other=0.0)
    for j in range(0, CHUNK, ROWS):
        i = CHUNK - ROWS - j
        t, at = c * CHUNK + i + rows, (i + rows)[:, None]
        inside = (t < S)[:, None] & (od < D)[None, :]
        r = rest[None, :] + tl.zeros([ROWS, BD], tl.float32)
        if CAUSAL:
            g = _times(tl.load(G + at * gt + od[None, :], mask=inside, other=0.0).to(tl.float32), SCALE, b, t, S)
            g *= _load_scaled(Q, NQ, at * qt + od[None, :], inside, b, t, n, S)
            r = _suffix(g, rest, rows, ROWS)
            rest += tl.sum(g, 0)
        ok = _valid_tokens(MASK, b, t, S)[:, None] & (od < D)[None, :]
        k = _load_scaled(K, NK, at * kt + od[None, :], ok, b, t, n, S)
        dk = r * tl.load(V + at * vt + od[None, :], mask=ok, other=0.0).to(tl.float32)
        if DOTS:
            strip = tl.program_id(0) % tl.cdiv(D, BD)
            tl.store(DK + strip.to(tl.int64) * n + b * S + t, tl.sum(k * dk, 1), mask=t < S)
        else:
            if DOT is not None:
                dk = _project(dk, k, NK, DOT, b, t, n, S)
            tl.store(DK + (b * S + first + at) * D + od[None, :], dk, mask=inside)
            tl.store(DV + (b * S + first + at) * D + od[None, :], k * r, mask=inside)


def _sums_shape(k: Tensor, causal: bool) -> tuple[int, ...]:
    """Return the shape of the sum before each chunk, or the sum over all keys."""
    B, S, D = k.shape
    return (B, -(-S // CHUNK), D) if causal else (B, 1, D)


def _norms(x: Tensor, mask: Tensor | None, on: bool, eps: float) -> Tensor | None:
    if not on:
        return None
    out = _empty_as(x, 2, *x.shape[:2], dtype=torch.float32)
    launch(
        norms,
        (-(-x.shape[1] // 4), x.shape[0]),
        x,
        mask,
        out,
        x.shape[1],
        x.shape[2],
        *x.stride()[:2],
        float(eps),
        ROWS=4,
        BD=256 if x.shape[2] > 64 else 64,
    )
    return out


TILE = {"CHUNK": CHUNK, "ROWS": ROWS, "BD": 64, "warps": 1}  # two features for each thread of a warp


def _sums(x: Tensor, nx: Tensor | None, y: Tensor, scale: Tensor | None, mask: Tensor | None) -> Tensor:
    """Sum x^ * y over each chunk, (B, chunks, D), in float64."""
    B, T, D = x.shape
    total = _empty_as(x, B, -(-T // CHUNK), D, dtype=torch.float32)
    launch(
        sums, _grid(x, TILE["BD"]), x, nx, y, scale, mask, total, T, D, B * T, *x.stride()[:2], *y.stride()[:2], **TILE
    )
    return total.double()


def _sum_before(total: Tensor) -> Tensor:
    """Sum all chunks before each."""
    return F.pad(total.cumsum(1)[:, :-1], (0, 0, 1, 0)).float()


def saved_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    of_q: bool,
    of_k: bool,
    eps: float,
    mean: bool,
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides its inputs."""
    return [_sums_shape(k, causal)]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    of_q: bool,
    of_k: bool,
    eps: float,
    mean: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D), and the tensor saved for the backward pass (empty unless ``save``).

    Args:
        of_q, of_k: whether queries, keys, are divided by their norm, with ``eps`` under the root.
        mean: whether the sum is divided by the number of keys that may be attended.
    """
    q, k, v = rows(q), rows(k), rows(v)
    scale, mask = mean_scale(mask, q, k.shape[1], causal) if mean else None, bytes_of(mask)
    nq, nk = _norms(q, None, of_q, eps), _norms(k, mask, of_k, eps)
    total, y = _sums(k, nk, v, None, mask), _empty_as(q, *q.shape)
    saved = _sum_before(total) if causal else total.sum(1, keepdim=True).float()
    _read(None, q, nq, k, nk, v, scale, mask, saved, None, y, causal)
    return y, saved if save else saved.new_empty(0)


def _read(g, q, nq, k, nk, v, scale, mask, saved, dot, out, causal, dots=False) -> None:
    B, T, D = q.shape
    strides = (*((0, 0) if g is None else g.stride()[:2]), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    given = (k, nk, v) if causal else (None, None, None)
    launch(
        read,
        _grid(q, TILE["BD"]),
        g,
        q,
        nq,
        *given,
        scale,
        mask,
        saved,
        dot,
        out,
        T,
        D,
        B * T,
        *strides,
        CAUSAL=causal,
        DOTS=dots,
        **TILE,
    )


def _back_keys(g, q, nq, k, nk, v, scale, mask, rest, dot, dk, dv, causal, dots=False) -> None:
    B, S, D = k.shape
    strides = (*g.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    given, scale = ((g, q, nq), scale) if causal else ((None, None, None), None)
    launch(
        back_keys,
        _grid(k, TILE["BD"]),
        *given,
        k,
        nk,
        v,
        scale,
        mask,
        rest,
        dot,
        dk,
        dv,
        S,
        D,
        B * S,
        *strides,
        CAUSAL=causal,
        DOTS=dots,
        **TILE,
    )


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    saved: Tensor,
    *,
    causal: bool,
    of_q: bool,
    of_k: bool,
    eps: float,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv."""
    g, q, k, v = rows(g), rows(q), rows(k), rows(v)
    scale, mask = mean_scale(mask, q, k.shape[1], causal) if mean else None, bytes_of(mask)
    nq, nk = _norms(q, None, of_q, eps), _norms(k, mask, of_k, eps)
    total = _sums(q, nq, g, scale, None)
    rest = _sum_before(total.flip(1)).flip(1).contiguous() if causal else total.sum(1, keepdim=True).float()
    dq, dk, dv = _empty_as(q, *q.shape), _empty_as(k, *k.shape), _empty_as(k, *k.shape)
    strips = -(-q.shape[2] // TILE["BD"])
    dots: list[Tensor | None] = [None, None]
    if nq is not None:
        part = _empty_as(q, strips, *q.shape[:2], dtype=torch.float32)
        _read(g, q, nq, k, nk, v, scale, mask, saved, None, part, causal, dots=True)
        dots[0] = part.sum(0)
    if nk is not None:
        part = _empty_as(k, strips, *k.shape[:2], dtype=torch.float32)
        _back_keys(g, q, nq, k, nk, v, scale, mask, rest, None, part, None, causal, dots=True)
        dots[1] = part.sum(0)
    _read(g, q, nq, k, nk, v, scale, mask, saved, dots[0], dq, causal)
    _back_keys(g, q, nq, k, nk, v, scale, mask, rest, dots[1], dk, dv, causal)
    return dq, dk, dv


def samples() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls on meta tensors that reach every configuration."""
    for dtype, D in itertools.product((torch.float32, torch.bfloat16, torch.float16), (64, 512)):
        for cosine, masked, mean, causal in itertools.product(
            (True, False), (False, True), (False, True), (True, False)
        ):
            x = torch.empty(2, 256, D, dtype=dtype, device="meta")
            mask = torch.empty(2, 256, dtype=torch.bool, device="meta") if masked else None
            label = f"{'causal ' * causal}{str(dtype)[6:]} D={D}{' cosine' * cosine}{' mask' * masked}{' mean' * mean}"
            yield (
                label,
                partial(
                    _sample, x, mask, {"causal": causal, "of_q": cosine, "of_k": cosine, "eps": 1e-6, "mean": mean}
                ),
            )


def benchmark(B: int, T: int, D: int, heads: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the forms at the benchmark's shape, causal and in bfloat16, as calls on meta tensors."""
    x = torch.empty(B, T, D, dtype=torch.bfloat16, device="meta")
    options = {"causal": True, "of_q": True, "of_k": True, "eps": 1e-6, "mean": False}
    yield "hydra", partial(_sample, x, None, options)


def _sample(x: Tensor, mask: Tensor | None, options: Options) -> None:
    saved = forward(x, x, x, mask, **options, save=True)[1]
    backward(x, x, x, x, mask, saved, **options)


EXCEPTIONS = dict.fromkeys(
    ("read", "back_keys"),
    {"wide": "a thread owns whole columns, two features in bfloat16, so that sums along time stay in its registers"},
)
