"""Write AFT-forget in primitive operators of ONNX, for any length; see ``lowered_aft``."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..functional.sums.softmax import MASKED_KEY
from .lowered_aft import LEAF, SPAN, STEPS, Keys, Sums, features, gate, in_chunks, merged, prefixes_of, row_sums
from .writer import Writer, pad_shape

SIZE = 16
"""Tokens of a chunk of plain sums, over which log-decays add up."""


def write_aft_forget(
    w: Writer, q: Any, k: ir.Value, v: ir.Value, g: ir.Value, mask: Any, *, heads: int, eps: float
) -> ir.Value:
    """Write ``functional.aft_forget``."""
    keys = Keys(w, k, v, mask)
    g = w.Unsqueeze(g if mask is None else w.Where(w.Unsqueeze(mask, [2]), g, 0.0), [1])
    lower = np.tril(np.ones((SIZE, SIZE), np.float32))
    decay = w.MatMul(lower, in_chunks(w, g, SIZE, "constant"))
    fits = w.And(keys.narrow, w.LessOrEqual(w.ReduceMax(w.Abs(decay), keepdims=0), SPAN))
    y = w.either(fits, lambda w: _plain(w, keys, decay), lambda w: _safe(w, keys, g))
    if heads:
        y = w.Reshape(y, [0, 0, heads, -1])
        y = w.Reshape(w.Div(y, w.Sqrt(w.Add(w.ReduceMean(w.Mul(y, y), [3]), eps))), [0, 0, features(v)])
    return gate(w, q, y)


def _plain(w: Writer, keys: Keys, decay: ir.Value) -> ir.Value:
    """Sum under one maximum; inside a chunk decays are factors of the row and of the key, and that of the row cancels.

    Args:
        decay: the sum of the log-decays from the start of the chunk to each row.
    """
    lower = np.tril(np.ones((SIZE, SIZE), np.float32))
    through, back = w.Exp(w.cut(decay, 3, SIZE - 1, SIZE)), w.Exp(w.Neg(decay))
    totals = []
    for terms in keys.terms(w):
        near = w.MatMul(lower, w.Mul(in_chunks(w, terms, SIZE, "constant"), back))
        each = w.Mul(w.cut(near, 3, SIZE - 1, SIZE), through)
        totals.append(w.Add(near, _decayed_prefixes(w, each, through)))
    return keys.finish(w, *totals)


def _decayed_prefixes(w: Writer, each: ir.Value, factor: ir.Value) -> ir.Value:
    """Sum over all chunks before each, by doubling; each multiplies what came before it by its factor."""
    one = pad_shape(5, 2, [1], [0], w)
    total, factor = w.Pad(each, one, mode="constant"), w.Pad(factor, one, 1.0, mode="constant")
    rows = w.count(w.size(total, 2))
    for step in range(STEPS):
        at = w.Max(w.Sub(rows, [2**step]), [0])
        total = w.Add(total, w.Mul(factor, w.Gather(total, at, axis=2)))
        factor = w.Mul(factor, w.Gather(factor, at, axis=2))
    return w.cut(total, 2, 0, w.size(each, 2))


def _safe(w: Writer, keys: Keys, g: ir.Value) -> ir.Value:
    """Sum with a maximum for each row, by pairs in chunks; log-decays are added, never subtracted."""
    k, v = keys.chunks(w, LEAF)
    g = w.Max(w.cast(in_chunks(w, g, LEAF, "constant")), MASKED_KEY)
    t, s, u = np.ogrid[:LEAF, :LEAF, :LEAF]
    passed = ((s < u) & (u <= t)).reshape(LEAF * LEAF, LEAF).astype(np.float64)
    between = w.Reshape(w.MatMul(passed, g), w.shapes([0, 0, -1, LEAF, LEAF], w.size(g, 4)))
    near = row_sums(w, k, v, between)
    ends = Sums(*(w.cut(a, 3, LEAF - 1, LEAF) for a in near))
    far = prefixes_of(w, ends, w.ReduceSum(g, [3]))
    total = merged(w, near, far._replace(m=w.Add(far.m, w.CumSum(g, np.array(3)))))
    return keys.finish(w, total.num, total.den)
