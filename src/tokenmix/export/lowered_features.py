"""Write Hydra and linear attention in primitive operators of ONNX, for any length; see ``lowered_aft``."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..functional.sums.softmax import FLOOR, MASKED_KEY, SCAN, SCAN_JUMP
from .lowered_aft import CHUNK, SPAN, TINY, Sums, in_chunks, prefixes_of, sums_before
from .writer import Writer, pad_shape

WIDE, LARGE = 64, 1e6
"""Tokens of a chunk of linear attention; the largest number to which elu + 1 is applied in float32."""

FLOAT, DOUBLE = int(ir.DataType.FLOAT), int(ir.DataType.DOUBLE)


def hide_masked(w: Writer, a: ir.Value, mask: Any) -> ir.Value:
    """Return a (B, T, D) with 0 in place of masked tokens."""
    return a if mask is None else w.Where(w.Unsqueeze(mask, [2]), a, 0.0)


def write_hydra(
    w: Writer,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    mask: Any,
    *,
    causal: int,
    of_q: int,
    of_k: int,
    eps: float,
    mean: int,
) -> ir.Value:
    """Write ``functional.hydra``; sums over chunks are added in float64."""
    q, k = (_unit(w, a, eps) if cosine else a for a, cosine in ((q, of_q), (hide_masked(w, k, mask), of_k)))
    terms = w.Mul(k, hide_masked(w, v, mask))
    if causal:
        lower = np.tril(np.ones((CHUNK, CHUNK), np.float32))
        near = w.MatMul(lower, in_chunks(w, w.Unsqueeze(terms, [1]), CHUNK, "constant"))
        total = w.Cast(sums_before(w, w.Cast(w.cut(near, 3, CHUNK - 1, CHUNK), to=DOUBLE)), to=FLOAT)
        total = w.Reshape(w.Add(near, total), w.shapes([0, -1], w.size(k, 2)))
        total = w.cut(total, 1, 0, w.size(k, 1))
    else:
        total = w.ReduceSum(terms, [1])
    if mean:
        total = w.Div(total, w.Max(_number(w, k, mask, bool(causal)), 1.0))
    return w.Mul(q, total)


def _number(w: Writer, k: ir.Value, mask: Any, causal: bool) -> ir.Value:
    """Return how many keys each row counts, (B or 1, T or 1, 1)."""
    if mask is not None:
        seen = w.Unsqueeze(w.Cast(mask, to=FLOAT), [2])
        return w.CumSum(seen, np.array(1)) if causal else w.ReduceSum(seen, [1])
    n = w.size(k, 1)
    return w.Cast(w.Unsqueeze(w.Add(w.count(n), [1]), [0, 2]) if causal else n, to=FLOAT)


def _unit(w: Writer, x: ir.Value, eps: float) -> ir.Value:
    """Compute x / sqrt(|x|^2 + eps), scaled so that squares stay finite."""
    unit = w.Max(w.ReduceMax(w.Abs(x), [-1]), 1.0)
    x = w.Div(x, unit)
    square = w.Add(w.ReduceSum(w.Mul(x, x), [-1]), w.Div(eps, w.Mul(unit, unit)))
    return w.Div(x, w.Sqrt(w.Where(w.Greater(square, 0.0), square, 1.0)))


def write_linear(
    w: Writer, q: ir.Value, k: ir.Value, v: ir.Value, mask: Any, *, heads: int, elu: int, causal: int
) -> ir.Value:
    """Write ``functional.linear_attention`` with elu + 1 or exp."""
    kept = None if mask is None else w.Unsqueeze(mask, [1, 3])  # (B, 1, S, 1)
    q, k, v = (
        w.Transpose(w.Reshape(a, [0, 0, heads, -1]), perm=[0, 2, 1, 3])
        for a in (q, hide_masked(w, k, mask), hide_masked(w, v, mask))
    )
    low, high = w.ReduceMin(q, keepdims=0), w.ReduceMax(q, keepdims=0)
    low, high = w.Min(low, w.ReduceMin(k, keepdims=0)), w.Max(high, w.ReduceMax(k, keepdims=0))
    fits = w.And(w.GreaterOrEqual(low, -SPAN), w.LessOrEqual(high, LARGE if elu else SPAN))

    def plain(w: Writer) -> ir.Value:
        a, b = (_feature(w, x, elu) for x in (q, k))
        b = b if kept is None else w.Where(kept, b, 0.0)
        num, den = (_plain_prefixes if causal else _plain_sums)(w, a, b, v)
        return w.Div(num, den if kept is None else w.Max(den, TINY))

    def safe(w: Writer) -> ir.Value:
        a, b = (_log_feature(w, w.cast(x), elu) for x in (q, k))
        b = b if kept is None else w.Where(kept, b, MASKED_KEY)
        num, den = (_safe_prefixes if causal else _safe_sums)(w, a, b, w.cast(v))
        return w.Div(num, w.Where(w.Greater(den, 0.0), den, 1.0))

    y = w.either(fits, plain, safe)
    return w.Reshape(w.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])


def _feature(w: Writer, x: ir.Value, elu: int) -> ir.Value:
    # elu(x) + 1, without a Where by sign: it takes longer in ONNX Runtime than the matrix products
    return w.Add(w.Max(x, 0.0), w.Exp(w.Min(x, 0.0))) if elu else w.Exp(x)


def _log_feature(w: Writer, x: ir.Value, elu: int) -> ir.Value:
    return w.Add(w.Log(w.Add(w.Max(x, 0.0), 1.0)), w.Min(x, 0.0)) if elu else x


def _swap(w: Writer, a: ir.Value, rank: int) -> ir.Value:
    return w.Transpose(a, perm=[*range(rank - 2), rank - 1, rank - 2])


def _join_chunks(w: Writer, a: ir.Value, like: ir.Value) -> ir.Value:
    """Join chunks (B, H, n, C, e) to the T rows of ``like`` (B, H, T, .)."""
    return w.cut(w.Reshape(a, w.shapes([0, 0, -1], w.size(a, 4))), 2, 0, w.size(like, 2))


def _plain_sums(w: Writer, a: ir.Value, b: ir.Value, v: ir.Value) -> tuple[ir.Value, ir.Value]:
    turned = _swap(w, b, 4)
    return w.MatMul(a, w.MatMul(turned, v)), w.MatMul(a, w.ReduceSum(turned, [3]))


def _plain_prefixes(w: Writer, a: ir.Value, b: ir.Value, v: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Read the pairs inside each chunk, and the sums of all chunks before it."""
    ab, bb, vb = (in_chunks(w, x, WIDE, "constant") for x in (a, b, v))
    turned = _swap(w, bb, 5)
    pairs = w.Mul(w.MatMul(ab, turned), np.tril(np.ones((WIDE, WIDE), np.float32)))
    before, number = (sums_before(w, x) for x in (w.MatMul(turned, vb), w.ReduceSum(turned, [4])))
    num = w.Add(w.MatMul(pairs, vb), w.MatMul(ab, before))
    den = w.Add(w.ReduceSum(pairs, [4]), w.MatMul(ab, number))
    return _join_chunks(w, num, a), _join_chunks(w, den, a)


def _safe_sums(w: Writer, a: ir.Value, b: ir.Value, v: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Read all keys, each feature in units of its largest key, each query in units of its largest feature."""
    m = w.Max(w.ReduceMax(b, [2]), FLOOR)
    z = w.Add(a, m)
    read = w.Exp(w.Sub(z, w.Max(w.ReduceMax(z, [3]), FLOOR)))
    turned = _swap(w, w.Exp(w.Sub(b, m)), 4)
    return w.MatMul(read, w.MatMul(turned, v)), w.MatMul(read, w.ReduceSum(turned, [3]))


def _safe_prefixes(w: Writer, a: ir.Value, b: ir.Value, v: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Do the same for prefixes, as ``functional.sums.features.causal_read``: chunks of SCAN tokens."""
    ab, bb, vb = (in_chunks(w, x, SCAN) for x in (a, b, v))
    top = bb
    step = 1
    while step < SCAN:  # the running maximum by doubling
        later = w.Max(w.cut(top, 3, step, SCAN), w.cut(top, 3, 0, SCAN - step))
        top, step = w.Concat(w.cut(top, 3, 0, step), later, axis=3), 2 * step
    top = w.Max(top, FLOOR)
    rise = w.Min(w.Sub(w.cut(top, 3, 1, SCAN), w.cut(top, 3, 0, SCAN - 1)), SCAN_JUMP)
    rise = w.CumSum(w.Pad(rise, pad_shape(5, 3, [1], [0], w), mode="constant"), np.array(3))
    rise = w.Sub(rise, w.Div(w.cut(rise, 3, SCAN - 1, SCAN), 2.0))
    m = w.cut(top, 3, SCAN - 1, SCAN)
    ends = w.Exp(w.Sub(bb, m))
    before = prefixes_of(w, Sums(m, w.MatMul(_swap(w, vb, 5), ends), w.ReduceSum(ends, [3])))
    here, there = w.Add(ab, top), w.Add(ab, before.m)
    unit = w.Max(w.ReduceMax(w.Max(here, there), [4]), FLOOR)
    pairs = w.MatMul(w.Exp(w.Sub(w.Sub(here, unit), rise)), _swap(w, w.Exp(w.Add(w.Sub(bb, top), rise)), 5))
    pairs = w.Where(np.tril(np.ones((SCAN, SCAN), bool)), pairs, 0.0)  # those not seen may have overflowed
    read = w.Exp(w.Sub(there, unit))
    num = w.Add(w.MatMul(pairs, vb), w.MatMul(read, _swap(w, before.num, 5)))
    den = w.Add(w.ReduceSum(pairs, [4]), w.ReduceSum(w.Mul(read, before.den), [4]))
    return _join_chunks(w, num, a), _join_chunks(w, den, a)
