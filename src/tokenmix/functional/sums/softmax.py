"""Sums of exp(k + w) v and exp(k + w) over keys, exact for any finite keys, without branching on values.

A partial sum is an accumulator in units of exp(m + lift), with m the largest key in it. The accumulator holds the sums
for the values and, as its last row, for 1: the denominator. m and lift are data that cancel in the ratio, so they carry
no gradient. They are kept apart because m can be any size, and a lift of some hundreds added to 1e20 would be lost.

Where all rows see the same keys, one maximum per feature is safe: in float64 a key 600 below it cannot matter while
weights span less than that. Rows that see different keys of one group follow the group's running maximum, and each of
its rises is cut to ``jump``: what lies more than ``jump`` below is negligible (exp(-42) < float64's eps), and the cut
keeps every exponent of the group inside float64's range.

Shapes: keys k (..., S, c'), values v (..., S, g, c'), accumulators (..., T, g + 1, c'). With a key per feature c' = D
and g = 1; with one key for a head of c features c' = 1 and g = c. A masked key has k = MASKED_KEY and v = 0; a key
given as float32's minimum counts as masked. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.precision import at_least_float32
from ..layout.masks import pad_zeros
from .gates import Gate, apply_gate
from .nonfinite import add_nan_mask, each_mark, nothing_to_hide, propagate_nonfinite

# the key of a masked token: float32's minimum, so that exporters that write constants in float32 preserve it
MASKED_KEY = -(2.0 - 2.0**-23) * 2.0**127
# the least maximum, one float32 step above: finite, so no difference is NaN, and exp(MASKED_KEY - FLOOR) is 0
FLOOR = -(2.0 - 2.0**-22) * 2.0**127
WEIGHT_CAP = 300.0  # larger log-weights are clamped to this
# 7 rises of 150, centred, with weights spanning 120 stay within exp(+-700), and exp(120 - 150) is negligible
LEAF, FAN, JUMP = 8, 8, 150.0
SCAN, SCAN_JUMP = 32, 42.0  # the same without weights
LITERAL_ELEMENTS = 2**22  # (rows, keys, features) held at once where every row needs its own maximum


class Sums(NamedTuple):
    """Hold partial sums: acc * exp(m + lift) is the sum over keys of which m is the largest.

    m and lift (..., T or 1, c'), acc (..., T, g + 1, c').
    """

    m: Tensor
    lift: Tensor
    acc: Tensor


def split_heads64(k: Tensor, v: Tensor, key_mask: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """Split (B, S, heads c') and (B, S, heads g c') into float64 heads, masked keys set to MASKED_KEY.

    Returns keys (B, heads, S, c') and values (B, heads, S, g, c').
    """
    kd, vd = k.double(), v.double()
    if key_mask is not None:
        kd, vd = torch.where(key_mask[:, :, None], kd, MASKED_KEY), torch.where(key_mask[:, :, None], vd, 0.0)
    per_key = k.shape[-1] // heads
    return kd.unflatten(-1, (heads, per_key)).transpose(1, 2), vd.unflatten(-1, (heads, -1, per_key)).transpose(1, 2)


def hidden_sums(
    form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, gate: Gate | None, **reach: Any
) -> Tensor:
    """Call form(q, k, v) through ``propagate_nonfinite``, feature by feature.

    A key of -inf has the weight 0 and hides nothing. Without a gate the numbers in q do not matter.
    """
    return _by_feature(form, q, finite_low(k), v, gate, **reach)


def _by_feature(
    form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, gate: Gate | None, **reach: Any
) -> Tensor:
    if gate is None:
        return propagate_nonfinite(lambda *keys: form(q, *keys), None, k, v, each=True, **reach)
    return propagate_nonfinite(form, q, k, v, each=True, **reach)


def gated_after(q: Tensor, y: Tensor, gate: Gate | None) -> Tensor:
    """Compute ``apply_gate`` on a kernel's output; rows that are not finite do not affect the gradients of others."""
    if gate is None or nothing_to_hide(q, y):
        return apply_gate(q, y, gate)
    # Not ``clean``: a NaN gradient goes on to the kernel, also where q is not finite.
    finite = [torch.nan_to_num(a, 0.0, 0.0, 0.0) for a in (q, y)]
    return add_nan_mask(apply_gate(finite[0], finite[1], gate), each_mark(q, y))


def kernel_sums(
    where: str, run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, gate: Gate | None, **reach: Any
) -> Tensor:
    """Call run(q, k, v) on a kernel, which applies the sigmoid itself and gets None for q with other gates.

    Kernels in C handle non-finite numbers themselves; from those in Triton they are hidden, feature by feature.
    """

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if gate == "sigmoid":
            return run(q, k, v)
        return gated_after(q, run(None, k, v), gate)

    if where == "cpu":
        return form(q, k, v)
    return _by_feature(form, q, k.clamp_min(torch.finfo(k.dtype).min), v, gate, **reach)  # a key of -inf has weight 0


def finite_low(k: Tensor) -> Tensor:
    """Return the keys in float64, with MASKED_KEY in place of -inf."""
    k = k.double()
    return torch.where(k == float("-inf"), MASKED_KEY, k)  # stores less for backward than clamp_min


def merge_heads(ratio: Tensor) -> Tensor:
    """Merge the heads of (B, heads, T, c) into (B, T, D)."""
    return ratio.transpose(1, 2).flatten(2)


def ratio_of(s: Sums) -> Tensor:
    """Divide numerator by denominator (..., T, c), giving exactly 0 where nothing was summed."""
    num, den = s.acc.split([s.acc.shape[-2] - 1, 1], -2)
    return (num / torch.where(den > 0, den, 1.0)).flatten(-2)


def merge(a: Sums, b: Sums) -> Sums:
    """Add the sums over two disjoint sets of keys."""
    m = torch.maximum(a.m, b.m)
    acc = a.acc * torch.exp(a.m - m + a.lift)[..., None, :] + b.acc * torch.exp(b.m - m + b.lift)[..., None, :]
    return Sums(m, torch.zeros_like(m), acc)


def products(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest key (..., 1, c') and the terms of the sums in its units."""
    m = k.detach().amax(-2, keepdim=True).clamp_min(FLOOR)
    return m, terms_of(k - m, v)


def terms_of(exponent: Tensor, v: Tensor) -> Tensor:
    """Return exp(exponent) v, with exp(exponent) itself as the last row: (..., S, g + 1, c')."""
    e = torch.exp(exponent)[..., None, :]
    return torch.cat([e * v, e], -2)


def valid_weight(x: Tensor) -> Tensor:
    """Return the weight of a lone key, exp(x) in units of itself, in float32 or wider.

    It is 1, 0 if the key is masked, and NaN if x is NaN or +inf.
    """
    x = at_least_float32(x)
    return torch.exp(x - x.detach().clamp_min(FLOOR))


def single_key_ratio(v: Tensor, weight: Tensor) -> Tensor:
    """Return the ratio of sums over one key: its value where its weight is positive, else exactly 0.

    The weight has no gradient, but NaN in it is propagated.
    """
    w = weight.detach()
    return v * (w / torch.where(w > 0, w, 1.0)) + 0.0 * weight


def over_all(k: Tensor, v: Tensor) -> Sums:
    """Sum over every key with weight 0, as one row."""
    m, terms = products(k, v)
    return Sums(m, torch.zeros_like(m), terms.sum(-3, keepdim=True))


def over_visible(k: Tensor, v: Tensor, w: Tensor) -> Sums:
    """Sum for T rows that all see the same keys, row t with weights w_t (..., T, S)."""
    m, terms = products(k, v)
    return Sums(m, torch.zeros_like(m), weigh(w, terms))


def weigh(w: Tensor, terms: Tensor) -> Tensor:
    """Compute sum_s exp(w_ts) terms_s: (..., T, S) and (..., S, g + 1, c') -> (..., T, g + 1, c')."""
    return (torch.exp(w.double().clamp_max(WEIGHT_CAP)) @ terms.flatten(-2)).unflatten(-1, terms.shape[-2:])


def over_leaf(k: Tensor, v: Tensor, w: Tensor | None, *, jump: float) -> Sums:
    """Sum over keys 0..t for each row t of a few."""
    top, rise = cut_running_max(k, jump)
    terms = terms_of(k - top + rise, v)
    seen = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool, device=k.device).tril()
    if w is None:
        acc = (seen.to(k.dtype) @ terms.flatten(-2)).unflatten(-1, terms.shape[-2:])
    else:
        acc = weigh(w.masked_fill(~seen, float("-inf")), terms)
    return Sums(top, -rise, acc)


def cut_running_max(k: Tensor, jump: float) -> tuple[Tensor, Tensor]:
    """Return the running maximum along dim -2, and its rises cut to ``jump`` and centred. Without gradient."""
    top = running_max(k.detach()).clamp_min(FLOOR)
    rise = F.pad((top[..., 1:, :] - top[..., :-1, :]).clamp_max(jump).cumsum(-2), (0, 0, 1, 0))
    return top, rise - rise[..., -1:, :] / 2


def running_max(k: Tensor) -> Tensor:
    """Compute the inclusive maximum over 0..t along dim -2, by doubling: a form that every exporter supports."""
    step = 1
    while step < k.shape[-2]:
        k = torch.cat([k[..., :step, :], torch.maximum(k[..., step:, :], k[..., :-step, :])], -2)
        step *= 2
    return k


def decay_sums(s: Sums, decay: Tensor) -> Sums:
    """Multiply sums by exp(decay): a change of their unit, which is data, so the accumulator carries the gradient."""
    fixed = decay.detach()
    return Sums(s.m + fixed, s.lift + torch.zeros_like(fixed), s.acc * torch.exp(decay - fixed)[..., None, :])


def scan(s: Sums, decay: Tensor | None = None) -> Sums:
    """Compute inclusive prefix sums over blocks: m (..., n, 1, c'), acc (..., n, 1, g + 1, c'), by doubling.

    Args:
        decay: (..., n, 1, c'); each block multiplies the sums of all before it by exp(decay).
    """
    step = 1
    while step < s.m.shape[-3]:
        early = Sums(*_blocks(s, None, -step))
        if decay is not None:
            late = decay[..., step:, :, :]
            early = decay_sums(early, late)
            decay = torch.cat([decay[..., :step, :, :], late + decay[..., :-step, :, :]], -3)
        later = merge(Sums(*_blocks(s, step, None)), early)
        s = Sums(
            *(torch.cat([a, b], a.ndim - d) for a, b, d in zip(_blocks(s, None, step), later, (3, 3, 4), strict=True))
        )
        step *= 2
    return s


def delay(s: Sums, blocks: int) -> Sums:
    """Shift sums by ``blocks``: block i of the result is block i - blocks, or an empty sum if there is none."""
    n = s.m.shape[-3]
    front = min(blocks, n)
    m, lift, acc = _blocks(s, None, n - front)
    before = (0, 0, 0, 0, front, 0)
    return Sums(F.pad(m, before, value=FLOOR), F.pad(lift, before), pad_zeros(acc, (0, 0, *before)))


def _blocks(s: Sums, start: int | None, stop: int | None) -> tuple[Tensor, Tensor, Tensor]:
    cut = slice(start, stop)
    return s.m[..., cut, :, :], s.lift[..., cut, :, :], s.acc[..., cut, :, :, :]


def prefix_sums(k: Tensor, v: Tensor) -> Sums:
    """Sum over keys 0..t with weight 0 for each row t."""
    T = k.shape[-2]
    if T == 1:  # a decode step: a quarter of the operators, which an export traces one by one
        return over_all(k, v)
    kb, vb = split_blocks(k, v, min(SCAN, T))
    total = over_leaf(kb, vb, None, jump=SCAN_JUMP)
    past = over_all(kb, vb)
    return join_blocks(merge(total, delay(scan(past), 1)), T)


def split_blocks(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cut the time axis into blocks (..., n, size, c') and (..., n, size, g, c').

    The padding at the end has weight zero.
    """
    extra = -k.shape[-2] % size
    k, v = F.pad(k, (0, 0, 0, extra), value=MASKED_KEY), pad_zeros(v, (0, 0, 0, 0, 0, extra))
    return k.unflatten(-2, (-1, size)), v.unflatten(-3, (-1, size))


def join_blocks(s: Sums, T: int) -> Sums:
    """Join blocks into T rows."""
    return Sums(
        s.m.flatten(-3, -2)[..., :T, :], s.lift.flatten(-3, -2)[..., :T, :], s.acc.flatten(-4, -3)[..., :T, :, :]
    )


def literal(k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    """Compute the ratio under each row's own maximum over the pairs that ``mask`` (..., T, S) allows.

    A few rows are processed at a time; this serves patterns without structure.
    """
    T, rows = w.shape[-2], max(1, LITERAL_ELEMENTS // max(1, v.numel()))
    parts = []
    for start in range(0, T, rows):
        keep = mask[..., start : start + rows, :, None]
        z = k[..., None, :, :] + w.double()[..., start : start + rows, :, None]
        top = z.detach().masked_fill(~keep, FLOOR).amax(-2, keepdim=True)
        terms = terms_of((z - top).masked_fill(~keep, float("-inf")), v[..., None, :, :, :])
        parts.append(ratio_of(Sums(top, top, terms.sum(-3))))
    return torch.cat(parts, -2)
