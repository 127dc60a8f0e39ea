"""Write sums over keys in primitive operators of ONNX, for any length: AFT-full, AFT-local, AFT-conv and AFT-simple.

Each causal form chooses by the numbers that it is given. Where the keys of every feature lie within ``SPAN`` of each
other, one maximum serves all rows: plain sums in float32. Otherwise it runs in float64 with a maximum of its own for
each row, by pairs in chunks of ``LEAF`` tokens, which are joined by doubling: ONNX has no cumulative maximum, and one
maximum would lose the tokens before a late spike. Where all rows see all keys, one maximum always serves.

Shapes: keys (B, h, n, C, c) and values (B, h, n, C, d) in n chunks of C tokens, with c = d, a key for each feature, or
c = 1, one for the d features of a head. Padding at the end comes after all rows that are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from ..functional.sums.softmax import FLOOR, MASKED_KEY, WEIGHT_CAP
from .writer import Writer, pad_shape

SPAN, WEIGHTS = 40.0, 30.0
"""Range of the keys, and largest absolute log-weight, that float32 holds under one maximum: exp(-40 - 30) is normal."""

CHUNK, LEAF, STEPS = 32, 8, 17
"""Tokens of a chunk of plain sums and of pairs; doublings that join chunks, enough for a million tokens."""

SLABS, BLOCK = 4, 128
"""Parts into which the rows of AFT-full are cut, to leave out later keys, and tokens of a block of its safe form."""

TINY, END = 1e-37, 2**62


class Sums(NamedTuple):
    """Hold sums in units of exp(m): the numerator and the denominator."""

    m: ir.Value
    num: ir.Value
    den: ir.Value


# --- keys and values ---


class Keys:
    """Keys k (B, h, T, c) and values v (B, h, T, d) with masked ones hidden, and their range.

    Args:
        k, v: (B, T, h c) and (B, T, h d).
        mask: bool (B, T) or None.
        heads: h, where a head has one key; 0: each feature has a key, and h = 1.
    """

    def __init__(self, w: Writer, k: ir.Value, v: ir.Value, mask: ir.Value | None, heads: int = 0):
        self.like, self.heads, self.masked = v, heads, mask is not None
        seen = None if mask is None else w.Unsqueeze(mask, [2])
        if seen is not None:
            k, v = w.Where(seen, k, MASKED_KEY), w.Where(seen, v, 0.0)
        m = w.Max(w.ReduceMax(k, [1]), FLOOR)
        low = w.ReduceMin(k if seen is None else w.Where(seen, k, m), [1])
        self.narrow = w.LessOrEqual(w.ReduceMax(w.Sub(m, low), keepdims=0), SPAN)
        self.k, self.v, self.m = self._by_head(w, k, 1), self._by_head(w, v, -1), self._by_head(w, m, 1)

    def _by_head(self, w: Writer, a: ir.Value, width: int) -> ir.Value:
        if not self.heads:
            return w.Unsqueeze(a, [1])
        return w.Transpose(w.Reshape(a, [0, 0, self.heads, width]), perm=[0, 2, 1, 3])

    def chunks(self, w: Writer, size: int) -> tuple[ir.Value, ir.Value]:
        """Return keys and values in chunks of ``size`` tokens, in the writer's type."""
        return w.cast(in_chunks(w, self.k, size)), w.cast(in_chunks(w, self.v, size))

    def terms(self, w: Writer) -> tuple[ir.Value, ir.Value]:
        """Return exp(k) v and exp(k) in units of the largest key: (B, h, T, .)."""
        e = w.Exp(w.Sub(w.cast(self.k), w.cast(self.m)))
        return w.Mul(e, w.cast(self.v)), e

    def finish(self, w: Writer, num: ir.Value, den: ir.Value) -> ir.Value:
        """Divide, drop the padding and join the heads: (B, T, D)."""
        if self.masked:
            den = w.Max(den, TINY)
        return self.join(w, w.Div(num, den))

    def join(self, w: Writer, y: ir.Value) -> ir.Value:
        """Drop the padding of (B, h, n, C, d) and join the heads."""
        width = features(self.like) // (self.heads or 1)
        y = w.cut(w.Reshape(y, [0, self.heads or 1, -1, width]), 2, 0, w.size(self.like, 1))
        if not self.heads:
            return w.Squeeze(y, [1])
        return w.Reshape(w.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])


def features(a: ir.Value) -> int:
    """Return the number of features, which is never a symbol."""
    assert a.shape is not None
    return int(a.shape[-1])  # type: ignore[arg-type]  # an integer


def in_chunks(w: Writer, a: ir.Value, size: int, mode: str = "edge") -> ir.Value:
    """Pad (B, h, T, c) to a multiple of ``size``, by its last row or by 0 ("constant"): (B, h, n, size, c)."""
    extra = w.Mod(w.Neg(w.size(a, 2)), [size])
    return recut(w, w.Pad(a, pad_shape(4, 2, [0], extra, w), mode=mode), size)


def recut(w: Writer, a: ir.Value, size: int) -> ir.Value:
    """Cut rows (B, h, .., c) into chunks: (B, h, n, size, c)."""
    return w.Reshape(a, w.shapes([0, 0, -1, size], w.size(a, -1)))


def later_rows(w: Writer, a: ir.Value, fill: float = 0.0) -> ir.Value:
    """Return the chunk before each of (B, h, n, ..), ``fill`` before the first."""
    return w.cut(w.Pad(a, pad_shape(5, 2, [1], [0], w), fill, mode="constant"), 2, 0, w.size(a, 2))


def earlier_rows(w: Writer, a: ir.Value) -> ir.Value:
    """Return the chunk after each, 0 after the last."""
    return w.cut(w.Pad(a, pad_shape(5, 2, [0], [1], w), mode="constant"), 2, 1, END)


def sums_before(w: Writer, a: ir.Value, *, reverse: bool = False) -> ir.Value:
    """Return the sums of all chunks before each, or of those after it."""
    return w.CumSum(a, np.array(2), exclusive=1, reverse=int(reverse))


def gate(w: Writer, q: ir.Value | None, y: ir.Value) -> ir.Value:
    """Apply the sigmoid of the queries, if there are any."""
    return y if q is None else w.Mul(w.Sigmoid(q), y)


# --- one maximum for all rows ---


def plain_prefixes(w: Writer, keys: Keys) -> ir.Value:
    """Compute AFT-simple by prefix sums."""
    lower = np.tril(np.ones((CHUNK, CHUNK), w.numbers))
    totals = []
    for terms in keys.terms(w):
        near = w.MatMul(lower, in_chunks(w, terms, CHUNK, "constant"))
        totals.append(w.Add(near, sums_before(w, w.cut(near, 3, CHUNK - 1, CHUNK))))
    return keys.finish(w, *totals)


# --- a maximum for each row ---


def row_sums(w: Writer, k: ir.Value, v: ir.Value, weights: ir.Value | None = None) -> Sums:
    """Sum within chunks of LEAF tokens by pairs, each row over the keys up to itself."""
    seen = np.tril(np.ones((LEAF, LEAF), bool))[..., None]
    z = w.Unsqueeze(k, [3])
    if weights is not None:
        z = w.Add(z, weights)
    z = w.Where(seen, z, MASKED_KEY)
    m = w.Max(w.ReduceMax(z, [4]), FLOOR)
    e = w.Exp(w.Sub(z, m))
    return Sums(*(w.Squeeze(a, [4]) for a in (m, w.ReduceSum(w.Mul(e, w.Unsqueeze(v, [3])), [4]), w.ReduceSum(e, [4]))))


def chunk_sums(w: Writer, k: ir.Value, v: ir.Value) -> Sums:
    """Sum over whole chunks: (B, h, n, 1, .)."""
    m = w.Max(w.ReduceMax(k, [3]), FLOOR)
    e = w.Exp(w.Sub(k, m))
    return Sums(m, w.ReduceSum(w.Mul(e, v), [3]), w.ReduceSum(e, [3]))


def merged(w: Writer, a: Sums, b: Sums) -> Sums:
    """Add sums over two sets of keys."""
    m = w.Max(a.m, b.m)
    of_a, of_b = w.Exp(w.Sub(a.m, m)), w.Exp(w.Sub(b.m, m))
    num = w.Add(w.Mul(a.num, of_a), w.Mul(b.num, of_b))
    return Sums(m, num, w.Add(w.Mul(a.den, of_a), w.Mul(b.den, of_b)))


def prefixes_of(w: Writer, s: Sums, decay: ir.Value | None = None, back: int = 0) -> Sums:
    """Sum over all chunks before each, by doubling; each multiplies what came before it by exp(decay).

    A first row stands for no chunks; ``back`` leaves out the nearest chunks.
    """
    one = pad_shape(5, 2, [1], [0], w)
    s = Sums(w.Pad(s.m, one, FLOOR), w.Pad(s.num, one, 0.0), w.Pad(s.den, one, 0.0))
    decay = None if decay is None else w.Pad(decay, one, 0.0)
    rows = w.count(w.size(s.m, 2))
    for step in range(STEPS):
        at = w.Max(w.Sub(rows, [2**step]), [0])
        early = Sums(*(w.Gather(a, at, axis=2) for a in s))
        if decay is not None:
            early = early._replace(m=w.Add(early.m, decay))
            decay = w.Add(decay, w.Gather(decay, at, axis=2))
        # row 0 is empty, so that what an early row counts twice is nothing
        s = merged(w, s, early)
    at = w.Max(w.Sub(w.count(w.Sub(w.size(s.m, 2), [1])), [back]), [0])
    return Sums(*(w.Gather(a, at, axis=2) for a in s))


def safe_prefixes(w: Writer, keys: Keys) -> ir.Value:
    """Compute AFT-simple with a running maximum."""
    k, v = keys.chunks(w, LEAF)
    total = merged(w, row_sums(w, k, v), prefixes_of(w, chunk_sums(w, k, v)))
    return keys.finish(w, total.num, total.den)


def write_aft_simple(w: Writer, q: Any, k: ir.Value, v: ir.Value, mask: Any, *, causal: int) -> ir.Value:
    """Write ``functional.aft_simple``."""
    keys = Keys(w, k, v, mask)
    if causal:
        y = w.either(keys.narrow, lambda w: plain_prefixes(w, keys), lambda w: safe_prefixes(w, keys))
    else:
        e = w.Exp(w.Sub(keys.k, keys.m))
        num, den = w.ReduceSum(w.Mul(e, keys.v), [2]), w.ReduceSum(e, [2])
        y = w.Squeeze(w.Div(num, w.Max(den, TINY) if mask is not None else den), [1])
    return gate(w, q, y)


# --- weights of pairs ---

Blocks = Callable[[Writer, int, int, int, int], ir.Value]
"""f(writer, size, L, row, column): in each block of ``size`` tokens, log-weights of L rows and L columns, counted from
the start of the block: (1 or B, 1 or h, n or 1, L, L), in the writer's type."""


def band_blocks(band: ir.Value, low: int, whole: int) -> Blocks:
    """Return the blocks of a band (1 or B, 1 or h, T or 1, width), whose entry j is of the key t + j - low; 0 beyond.

    Rows are padded to a multiple of ``whole``.
    """
    assert band.shape is not None
    one, width = band.shape[2] == 1, int(band.shape[3])  # type: ignore[arg-type]  # an integer

    def write_blocks(w: Writer, size: int, L: int, row: int, column: int) -> ir.Value:
        tap = column - row + np.arange(L) - np.arange(L)[:, None] + low
        known, at = (tap >= 0) & (tap < width), np.clip(tap, 0, width - 1).astype(np.int64)
        if one:
            found = w.Unsqueeze(w.Gather(w.Squeeze(band, [2]), at, axis=2), [2])
        else:
            rows = w.cut(recut(w, in_chunks(w, band, whole), size), 3, row, row + L)
            found = w.GatherElements(rows, w.Expand(at, w.shapes(w.Shape(rows, start=0, end=3), [L, L])), axis=4)
        return w.Where(known, w.cast(found), 0.0)

    return write_blocks


def table_blocks(table: ir.Value, whole: int) -> Blocks:
    """Return the blocks of log-weights (1 or B, 1, T, T), whose rows are padded to a multiple of ``whole``."""

    def write_blocks(w: Writer, size: int, L: int, row: int, column: int) -> ir.Value:
        rows = w.cut(recut(w, in_chunks(w, table, whole), size), 3, row, row + L)
        start = w.Mul(w.Unsqueeze(w.count(w.size(rows, 2)), [1, 2]), [size])
        at = w.Min(w.Add(start, column + np.arange(L)), w.Sub(w.size(table, 3), [1]))
        at = w.Expand(at, w.shapes(w.Shape(rows, start=0, end=3), [L, L]))
        return w.cast(w.GatherElements(rows, at, axis=4))

    return write_blocks


def exp_weights(w: Writer, a: ir.Value) -> ir.Value:
    """Return exp of log-weights, which above WEIGHT_CAP count as that."""
    return w.Exp(w.Min(a, WEIGHT_CAP) if w.double else a)


def tree_sums(w: Writer, k: ir.Value, v: ir.Value, size: int, blocks: Blocks) -> Sums:
    """Sum within blocks (B, h, n, size, .), each row over the keys up to itself: by pairs, then by halves."""
    k, v = recut(w, k, LEAF), recut(w, v, LEAF)
    total, length = row_sums(w, k, v, w.Unsqueeze(blocks(w, LEAF, LEAF, 0, 0), [-1])), LEAF
    while length < size:
        keys, values = (w.cut(recut(w, a, 2 * length), 3, 0, length) for a in (k, v))
        far = weighed_sums(w, keys, values, blocks(w, 2 * length, length, length, 0))
        whole = [recut(w, a, 2 * length) for a in total]
        first, second = ([w.cut(a, 3, at, at + length) for a in whole] for at in (0, length))
        total = Sums(*(w.Concat(a, b, axis=3) for a, b in zip(first, merged(w, Sums(*second), far), strict=True)))
        length *= 2
    return total


def weighed_sums(w: Writer, k: ir.Value, v: ir.Value, weights: ir.Value) -> Sums:
    """Sum over all keys of a chunk with log-weights (.., rows, keys)."""
    m, e = w.Max(w.ReduceMax(k, [3]), FLOOR), exp_weights(w, weights)
    terms = w.Exp(w.Sub(k, m))
    return Sums(m, w.MatMul(e, w.Mul(terms, v)), w.MatMul(e, terms))


def small(w: Writer, weights: ir.Value) -> ir.Value:
    """Return whether all log-weights lie within WEIGHTS."""
    return w.LessOrEqual(w.ReduceMax(w.Abs(weights), keepdims=0), WEIGHTS)


# --- AFT-local and AFT-conv ---


def write_aft_band(w: Writer, q: Any, k: ir.Value, v: ir.Value, band: ir.Value, mask: Any, *, causal: int) -> ir.Value:
    """Write ``functional.sums.band.aft_band``."""
    assert band.shape is not None
    width, per_key = int(band.shape[3]), features(k)  # type: ignore[arg-type]  # an integer
    low, high = (width - 1, 0) if causal else (width // 2, width - 1 - width // 2)
    keys = Keys(w, k, v, mask, 0 if per_key == features(v) and band.shape[1] == 1 else per_key)
    size = LEAF
    while size < max(low, high):
        size *= 2

    def plain(w: Writer) -> ir.Value:
        most = max(size, CHUNK)
        return plain_band(w, keys, band_blocks(band, low, most), most, bool(causal))

    if not causal:
        return gate(w, q, w.either(small(w, band), plain, plain))
    fits = w.And(keys.narrow, small(w, band))
    return gate(w, q, w.either(fits, plain, lambda w: safe_band(w, keys, band_blocks(band, low, size), size)))


def plain_band(w: Writer, keys: Keys, blocks: Blocks, size: int, causal: bool) -> ir.Value:
    """Sum with weights over the own block and those beside it, and without weights over all others."""
    own, before = (exp_weights(w, blocks(w, size, size, 0, at)) for at in (0, -size))
    after = None if causal else exp_weights(w, blocks(w, size, size, 0, size))
    if causal:
        own = w.Mul(own, np.tril(np.ones((size, size), w.numbers)))
    totals = []
    for terms in keys.terms(w):
        a = in_chunks(w, terms, size, "constant")
        each = w.ReduceSum(a, [3])
        total = w.Add(w.MatMul(own, a), w.MatMul(before, later_rows(w, a)))
        total = w.Add(total, later_rows(w, sums_before(w, each)))
        if after is not None:
            total = w.Add(total, w.MatMul(after, earlier_rows(w, a)))
            total = w.Add(total, earlier_rows(w, sums_before(w, each, reverse=True)))
        totals.append(total)
    return keys.finish(w, *totals)


def safe_band(w: Writer, keys: Keys, blocks: Blocks, size: int) -> ir.Value:
    """Do the same with a maximum for each row: own block, the one before it, all older ones."""
    k, v = keys.chunks(w, size)
    near = tree_sums(w, k, v, size, blocks)
    before = weighed_sums(w, later_rows(w, k, MASKED_KEY), later_rows(w, v), blocks(w, size, size, 0, -size))
    far = prefixes_of(w, chunk_sums(w, k, v), back=1)
    total = merged(w, merged(w, near, before), far)
    return keys.finish(w, total.num, total.den)


# --- AFT-full ---


def write_aft_full(
    w: Writer, q: Any, k: ir.Value, v: ir.Value, table: ir.Value, other: Any, mask: Any, *, causal: int
) -> ir.Value:
    """Write ``functional.aft_full``, with a table of log-weights or its factors."""
    keys = Keys(w, k, v, mask)
    if other is not None:
        table = w.MatMul(table, w.Transpose(other, perm=[0, 2, 1]))
    table = w.Unsqueeze(table, [1])
    if not causal:

        def plain(w: Writer) -> ir.Value:
            e = exp_weights(w, w.cast(table))
            num, den = (w.MatMul(e, a) for a in keys.terms(w))
            return w.Squeeze(w.Div(num, w.Max(den, TINY) if keys.masked else den), [1])

        return gate(w, q, w.either(small(w, table), plain, plain))
    fits = w.And(keys.narrow, small(w, table))
    y = w.either(fits, lambda w: plain_full(w, keys, table), lambda w: safe_full(w, keys, table))
    return gate(w, q, y)


def plain_full(w: Writer, keys: Keys, table: ir.Value) -> ir.Value:
    """Sum slab by slab of rows, each over the keys up to its last row."""
    e, terms = w.Trilu(w.Exp(table), upper=0), keys.terms(w)
    rows = w.Div(w.Add(w.size(table, 2), [SLABS - 1]), [SLABS])
    parts = []
    for i in range(SLABS):
        stop = w.Mul(rows, [i + 1])
        part = w.cut(w.Slice(e, w.Mul(rows, [i]), stop, [2]), 3, 0, stop)
        num, den = (w.MatMul(part, w.cut(a, 2, 0, stop)) for a in terms)
        parts.append(w.Div(num, w.Max(den, TINY) if keys.masked else den))
    return w.Squeeze(w.Concat(*parts, axis=2), [1])


def safe_full(w: Writer, keys: Keys, table: ir.Value) -> ir.Value:
    """Do the same with a maximum for each row: within blocks, and for each block over all keys before it."""
    k, v = keys.chunks(w, BLOCK)
    near, n = tree_sums(w, k, v, BLOCK, table_blocks(table, BLOCK)), w.size(k, 2)
    block = w.count(n)
    earlier = w.Unsqueeze(w.Less(block, w.Unsqueeze(block, [1])), [2])  # (n, n, 1)
    tops = w.Unsqueeze(w.Squeeze(w.ReduceMax(k, [3]), [3]), [2])
    m = w.Max(w.ReduceMax(w.Where(earlier, tops, FLOOR), [3]), FLOOR)  # (B, 1, n, 1, D)
    k, v = (w.Reshape(a, w.shapes([0, 0, 1, -1], w.size(a, 4))) for a in (k, v))
    token = w.count(w.size(k, 3))
    earlier = w.Unsqueeze(w.Less(token, w.Unsqueeze(w.Mul(block, [BLOCK]), [1])), [2])  # (n, tokens, 1)
    terms = w.Exp(w.Sub(w.Where(earlier, k, MASKED_KEY), m))
    rows = in_chunks(w, table, BLOCK)
    extra = w.Sub(w.size(k, 3), w.size(rows, 4))
    e = exp_weights(w, w.cast(w.Pad(rows, pad_shape(5, 4, [0], extra, w), mode="constant")))
    total = merged(w, near, Sums(m, w.MatMul(e, w.Mul(terms, v)), w.MatMul(e, terms)))
    return keys.finish(w, total.num, total.den)
