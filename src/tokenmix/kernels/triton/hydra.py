"""Run Hydra attention in Triton: y_t = q^_t * sum_s k^_s * v_s, feature by feature, over s <= t or over all s.

q^ and k^ are the rows themselves or x / sqrt(|x|^2 + eps). A program owns a chunk of 64 tokens with all features and
takes it a few rows at a time, so that the norms are sums within the program and each tensor is read once in a launch; a
thread owns whole columns. Causal sums go by chunks: the sum of each, the sums of all before each (in float64), then the
outputs.

Backward, with h_t = scale_t g_t:  dq^_t = h_t * S_t,  dv_s = k^_s * R_s,  dk^_s = v_s * R_s,  where R_s is the sum of
h_t * q^_t over the queries that see s, and dx = r (dx^ - x^ (x^ . dx^)) with r = 1 / sqrt(|x|^2 + eps).
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
from .aft_simple import CHUNK, _empty_as, _suffix, _valid_tokens, rows
from .launch import bytes_of, launch


@triton.jit
def _norm(x, eps, NORM: tl.constexpr):
    """Return two factors of each row of a tile, x^ = x * one * other; the square of a norm may not fit float32."""
    one = tl.full([x.shape[0]], 1.0, tl.float32)
    other = one
    if NORM:
        small, large = x * 2.0**-64, x * 2.0**64
        plain, down, up = tl.sum(x * x, 1), tl.sum(small * small, 1), tl.sum(large * large, 1)
        long, short = ~(plain < 1e36), (plain < 1e-20) & (eps < 1e-20)
        one = tl.where(long, 2.0**-64, tl.where(short, 2.0**64, 1.0))
        square = tl.where(long, down, tl.where(short, up + eps * 2.0**64 * 2.0**64, plain + eps))
        other = tl.where(square > 0, 1.0 / tl.sqrt(tl.where(square > 0, square, 1.0)), 0.0)
    return one[:, None], other[:, None]


@triton.jit
def _load(X, at, ok):
    """Load a tile in float32; zeros where not ok."""
    return tl.load(X + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _load_scaled(X, at, ok, eps, NORM: tl.constexpr):
    """Load x^ of a tile in float32; zeros where not ok."""
    x = _load(X, at, ok)
    one, other = _norm(x, eps, NORM)
    return x * one * other


@triton.jit
def _times(x, SCALE, b, t, T):
    """Multiply the rows of a tile by SCALE (B, T)."""
    if SCALE is not None:
        x *= tl.load(SCALE + b * T + t, mask=t < T, other=0.0)[:, None]
    return x


@triton.jit
def _project(dx, x, one, other, NORM: tl.constexpr):
    """Compute dx from dx^, x^ and the factors of its rows."""
    if NORM:
        dx = (dx - x * tl.sum(dx * x, 1)[:, None]) * one * other
    return dx


@triton.jit
def sums(
    X, Y, SCALE, MASK, TOTAL, T, D, xb, xt, yb, yt, eps,
    NORM: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute TOTAL (B, chunks, D), the sum of x^ * y over each chunk."""
    c, b, od = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    X += b * xb + first * xt
    Y += b * yb + first * yt
    total = tl.zeros([BD], tl.float32)
    for i in range(0, CHUNK, ROWS):
        t, at = c * CHUNK + i + rows, (i + rows)[:, None]
        ok = _valid_tokens(MASK, b, t, T)[:, None] & (od < D)[None, :]
        x = _load_scaled(X, at * xt + od[None, :], ok, eps, NORM)
        total += tl.sum(x * _times(_load(Y, at * yt + od[None, :], ok), SCALE, b, t, T), 0)
    tl.store(TOTAL + (b * tl.num_programs(0) + c) * D + od, total, mask=od < D)


@triton.jit
def read(
    G, Q, K, V, SCALE, MASK, SUM, OUT, T, D, gb, gt, qb, qt, kb, kt, vb, vt, eps,
    CAUSAL: tl.constexpr, OF_Q: tl.constexpr, OF_K: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Compute q^ * S without G, and dq with it; SUM (B, chunks or 1, D) is S before each chunk, or that of all keys."""
    c, b, od = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    if CAUSAL:
        K += b * kb + first * kt
        V += b * vb + first * vt
        SUM += (b * tl.num_programs(0) + c) * D
    else:
        SUM += b * D
    before = tl.load(SUM + od, mask=od < D, other=0.0)
    for i in range(0, CHUNK, ROWS):
        t, at = c * CHUNK + i + rows, (i + rows)[:, None]
        inside = (t < T)[:, None] & (od < D)[None, :]
        s = before[None, :] + tl.zeros([ROWS, BD], tl.float32)
        if CAUSAL:
            ok = _valid_tokens(MASK, b, t, T)[:, None] & (od < D)[None, :]
            kv = _load_scaled(K, at * kt + od[None, :], ok, eps, OF_K) * _load(V, at * vt + od[None, :], ok)
            s += tl.cumsum(kv, 0)
            before += tl.sum(kv, 0)
        s = _times(s, SCALE, b, t, T)
        if G is None:
            s *= _load_scaled(Q + b * qb + first * qt, at * qt + od[None, :], inside, eps, OF_Q)
        else:
            s *= _load(G + b * gb + first * gt, at * gt + od[None, :], inside)
            if OF_Q:
                q = _load(Q + b * qb + first * qt, at * qt + od[None, :], inside)
                one, other = _norm(q, eps, OF_Q)
                s = _project(s, q * one * other, one, other, OF_Q)
        tl.store(OUT + (b * T + first + at) * D + od[None, :], s, mask=inside)


@triton.jit
def back_keys(
    G, Q, K, V, SCALE, MASK, REST, DK, DV, S, D, gb, gt, qb, qt, kb, kt, vb, vt, eps,
    CAUSAL: tl.constexpr, OF_Q: tl.constexpr, OF_K: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv. REST (B, chunks or 1, D) is the sum of h * q^ after each chunk, or over all queries."""
    c, b, od = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    rows, first = tl.arange(0, ROWS), c.to(tl.int64) * CHUNK
    K += b * kb + first * kt
    V += b * vb + first * vt
    if CAUSAL:
        G += b * gb + first * gt
        Q += b * qb + first * qt
        REST += (b * tl.num_programs(0) + c) * D
    else:
        REST += b * D
    rest = tl.load(REST + od, mask=od < D, other=0.0)
    for j in range(0, CHUNK, ROWS):
        i = CHUNK - ROWS - j
        t, at = c * CHUNK + i + rows, (i + rows)[:, None]
        inside = (t < S)[:, None] & (od < D)[None, :]
        r = rest[None, :] + tl.zeros([ROWS, BD], tl.float32)
        if CAUSAL:
            h = _times(_load(G, at * gt + od[None, :], inside), SCALE, b, t, S)
            h *= _load_scaled(Q, at * qt + od[None, :], inside, eps, OF_Q)
            r = _suffix(h, rest, rows, ROWS)
            rest += tl.sum(h, 0)
        ok = _valid_tokens(MASK, b, t, S)[:, None] & (od < D)[None, :]
        k = _load(K, at * kt + od[None, :], ok)
        one, other = _norm(k, eps, OF_K)
        k *= one * other
        dk = _project(r * _load(V, at * vt + od[None, :], ok), k, one, other, OF_K)
        tl.store(DK + (b * S + first + at) * D + od[None, :], dk, mask=inside)
        tl.store(DV + (b * S + first + at) * D + od[None, :], k * r, mask=inside)


def _sums_shape(k: Tensor, causal: bool) -> tuple[int, ...]:
    """Return the shape of the sum before each chunk, or the sum over all keys."""
    B, S, D = k.shape
    return (B, -(-S // CHUNK), D) if causal else (B, 1, D)


def _run(kernel: object, like: Tensor, *args: object, **constants: bool) -> None:
    """Launch a kernel with a program for each chunk of ``like`` (B, T, D)."""
    B, T, D = like.shape
    width = triton.next_power_of_2(D)
    tile = {"ROWS": max(1, min(8, 512 // width), min(2, 4096 // width)), "BD": width}  # 16 numbers of a thread
    warps = max(1, min(8, width // 256))  # each thread 8 neighbours in a row
    launch(kernel, (-(-T // CHUNK), B), *args, CHUNK=CHUNK, warps=warps, **tile, **constants)


def _sums(x: Tensor, y: Tensor, scale: Tensor | None, mask: Tensor | None, eps: float, norm: bool) -> Tensor:
    """Sum x^ * y over each chunk, (B, chunks, D), in float64."""
    B, T, D = x.shape
    total = _empty_as(x, B, -(-T // CHUNK), D, dtype=torch.float32)
    _run(sums, x, x, y, scale, mask, total, T, D, *x.stride()[:2], *y.stride()[:2], eps, NORM=norm)
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
    total, y = _sums(k, v, None, mask, eps, of_k), _empty_as(q, *q.shape)
    saved = _sum_before(total) if causal else total.sum(1, keepdim=True).float()
    _read(None, q, k, v, scale, mask, saved, y, eps, CAUSAL=causal, OF_Q=of_q, OF_K=of_k)
    return y, saved if save else saved.new_empty(0)


def _read(g, q, k, v, scale, mask, saved, out, eps, **options: bool) -> None:
    strides = (*((0, 0) if g is None else g.stride()[:2]), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    given = (k, v) if options["CAUSAL"] else (None, None)
    _run(read, q, g, q, *given, scale, mask, saved, out, *q.shape[1:], *strides, eps, **options)


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
    total, options = _sums(q, g, scale, None, eps, of_q), {"CAUSAL": causal, "OF_Q": of_q, "OF_K": of_k}
    rest = _sum_before(total.flip(1)).flip(1).contiguous() if causal else total.sum(1, keepdim=True).float()
    dq, dk, dv = _empty_as(q, *q.shape), _empty_as(k, *k.shape), _empty_as(k, *k.shape)
    _read(g, q, k, v, scale, mask, saved, dq, eps, **options)
    strides = (*g.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    given = (g, q, k, v, scale) if causal else (None, None, k, v, None)
    _run(back_keys, k, *given, mask, rest, dk, dv, *k.shape[1:], *strides, eps, **options)
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
