"""Softmax attention over a pattern of pairs, by blocks: no T x T tensor is made where the pattern has structure.

A row's softmax is put together from parts, sums over disjoint sets of keys under a maximum of their own. Inside, tensors are (..., T, e) in float32 or better,
queries already scaled, keys and values zero where ``live`` is False; True = may be attended. All are finite: what is not is hidden, and marked by NaN in one
more channel, the last of queries, values and ``num``, which ``ratio`` adds to what it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError
from ..backend import choose
from ..sums.nonfinite import clean, marks, over_pairs
from ..sums.precision import at_least_float32
from .checks import check_qkv
from .heads import by_head
from .masks import allowed, zero_masked
from .positions import Positions, first_true

FLOOR = -1e30  # the maximum of no keys at all: finite, so that differences are
LEAST = 16  # no smaller blocks, whose overhead costs more than the pairs they save
Pairs = Callable[[Tensor, Tensor], Tensor]


class Part(NamedTuple):
    """Sums over some of the keys: num = sum e^(logit - top) v and the marks met (..., T, e + 1), den = sum e^(logit - top) (..., T, 1); top (..., T, 1) is
    outside of the graph."""

    top: Tensor
    num: Tensor
    den: Tensor


class Ready(NamedTuple):
    """What every form starts from: q and v (B, H, T, e + 1), k (B, H, T, e); live (B, 1, T) or None where all keys are."""

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor | None


def check(who: str, q: Tensor, k: Tensor, v: Tensor, heads: int, backend: str, **counts: int) -> None:
    """Refuse shapes that do not fit and counts below 1."""
    choose(who, backend, q)
    check_qkv(who, q, k, v, heads, False, None)
    for name, n in counts.items():
        if not isinstance(n, int) or n < 1:
            raise MixerError(f"{who}: {name} must be an integer >= 1, got {n!r}.")


def split(a: Tensor, heads: int) -> Tensor:
    """(B, T, H e) -> (B, H, T, e) in float32 or better."""
    return by_head(at_least_float32(a), heads)


def ready(q: Tensor, k: Tensor, v: Tensor, heads: int, key_mask: Tensor | None) -> Ready:
    """Heads split, queries scaled by 1 / sqrt(e), masked keys and values put to zero whatever they hold."""
    k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    own, met = marks(q)[:, None], marks(k, v)[:, None]
    q, k, v = (split(clean(a), heads) for a in (q, k, v))
    q, v = (torch.cat([a, m.to(a.dtype).expand(-1, heads, -1, -1)], -1) for a, m in ((q * q.shape[-1] ** -0.5, own), (v, met)))
    return Ready(q, k, v, None if key_mask is None else key_mask[:, None])


def joined(y: Tensor, like: Tensor) -> Tensor:
    """(B, H, T, e) -> (B, T, H e) in the dtype of ``like``."""
    return y.transpose(1, 2).flatten(2).to(like.dtype)


def part_of(q: Tensor, k: Tensor, v: Tensor, ok: Tensor) -> Part:
    """The sums of q (..., T, e + 1) over the keys k (..., S, e) and v (..., S, e + 1) that ok, broadcast to (..., T, S), allows."""
    return sums_of(products(q, k), ok, q, v)


def products(q: Tensor, k: Tensor) -> Tensor:
    """The logits of all pairs, (..., T, S)."""
    return q[..., :-1] @ k.mT


def sums_of(logits: Tensor, ok: Tensor, q: Tensor, v: Tensor) -> Part:
    """The same from the logits; of the queries only the marks count."""
    logits = logits.masked_fill(~ok, float("-inf"))
    top = logits.detach().amax(-1, keepdim=True).clamp_min(FLOOR)
    weights = torch.exp(logits - top)
    met = over_pairs(ok, v[..., -1:]).to(v.dtype) + q[..., -1:]
    return Part(top, torch.cat([weights @ v[..., :-1], met], -1), weights.sum(-1, keepdim=True))


def ratio(*parts: Part) -> Tensor:
    """num / den of all parts together; exactly 0 where there are no keys."""
    first, *rest = parts
    num, den = first.num, first.den
    if rest:
        top = reduce(torch.maximum, [p.top for p in parts])
        factors = [torch.exp(p.top - top) for p in parts]
        num = sum((p.num * f for p, f in zip(rest, factors[1:], strict=True)), num * factors[0])
        den = sum((p.den * f for p, f in zip(rest, factors[1:], strict=True)), den * factors[0])
    return num[..., :-1] / torch.where(den > 0, den, 1.0) + num[..., -1:]


def dense(r: Ready, ok: Tensor) -> Tensor:
    """The masked T x S form, for patterns without structure: ok (B, T, S) or (B, H, T, S)."""
    return ratio(part_of(r.q, r.k, r.v, ok[:, None] if ok.ndim == 3 else ok))


def pairs_of(positions: Positions, q: Tensor, k: Tensor, *, causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """For the dense form: positions of the queries (B, T, 1) and of the keys (B, 1, S), and the pairs all masks allow (B, T, S)."""
    rows, cols = positions if isinstance(positions, tuple) else (positions, positions)
    ok = allowed(q.shape[0], q.shape[1], k.shape[1], causal=causal, key_mask=key_mask, attn_mask=attn_mask, device=q.device)
    return rows[:, :, None], cols[:, None, :], ok


def own_positions(q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Index minus index of the first True of the key mask, (B, T); negative before it."""
    if q.shape[1] != k.shape[1]:
        raise MixerError(f"a pattern over {q.shape[1]} queries and {k.shape[1]} keys needs positions=(of queries, of keys).")
    index = torch.arange(k.shape[1], device=k.device).expand(k.shape[:2])
    return index if key_mask is None else index - first_true(key_mask)


def blockwise(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, size: int, behind: int, before: int, pairs: Pairs) -> Part:
    """Each block of ``size`` queries over its own block of keys, ``behind`` blocks before it and ``before`` after it, where ``pairs`` allows.

    pairs(rows (n, size, 1), cols (n, 1, m size)) is given indices and answers in bool. Time and memory O(T m size), with m = behind + 1 + before.
    """
    N = q.shape[-2]
    n = -(-N // size)
    behind, before = min(behind, n - 1), min(before, n - 1)
    qb, kb, vb = (cut(a, n, size) for a in (q, k, v))
    kb, vb = (neighbours(a, behind, before) for a in (kb, vb))
    start = size * torch.arange(n, device=q.device)
    rows = (start[:, None] + torch.arange(size, device=q.device))[:, :, None]
    cols = (start[:, None] + torch.arange(-behind * size, (before + 1) * size, device=q.device))[:, None, :]
    ok = pairs(rows, cols) & (cols >= 0) & (cols < N)
    if valid is not None:
        ok = ok & neighbours(cut(valid[..., None], n, size), behind, before).mT
    return Part(*(a.flatten(-3, -2)[..., :N, :] for a in part_of(qb, kb, vb, ok)))


def band(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, *, back: int, ahead: int, hole: int = -1) -> Part:
    """Keys s with t - back <= s <= t + ahead and |t - s| > hole."""
    N = q.shape[-2]
    size = min(max(back, ahead, LEAST), N)

    def pairs(rows: Tensor, cols: Tensor) -> Tensor:
        ok = (cols >= rows - back) & (cols <= rows + ahead)
        return ok if hole < 0 else ok & ((cols - rows).abs() > hole)

    return blockwise(q, k, v, valid, size, -(-back // size), -(-ahead // size), pairs)


def cut(a: Tensor, n: int, size: int) -> Tensor:
    """(..., N, e) -> (..., n, size, e), zeros or False after the end."""
    short = n * size - a.shape[-2]
    if torch.compiler.is_dynamo_compiling() or short:  # with a free length the compiler then knows that n * size is the number of rows
        a = torch.cat([a, a.new_zeros(*a.shape[:-2], short, a.shape[-1])], -2)
    return a.unflatten(-2, (n, size))


def neighbours(a: Tensor, behind: int, before: int) -> Tensor:
    """(..., n, size, e) -> (..., n, m size, e): blocks i - behind .. i + before side by side, zeros or False where there is none."""
    if behind == before == 0:
        return a
    n = a.shape[-3]
    edges = [a.new_zeros(*a.shape[:-3], count, *a.shape[-2:]) for count in (behind, before)]
    wide = torch.cat([edges[0], a, edges[1]], -3)
    return torch.cat([wide[..., j : j + n, :, :] for j in range(behind + before + 1)], -2)


def classes(a: Tensor, step: int) -> Tensor:
    """(..., T, e) -> (..., step, n, e): the tokens of each residue of the position modulo ``step``, in order."""
    if step == 1:
        return a[..., None, :, :]
    return cut(a, -(-a.shape[-2] // step), step).transpose(-3, -2)


def unclasses(p: Part, T: int) -> Part:
    """Back to the order of positions."""
    return Part(*(a.transpose(-3, -2).flatten(-3, -2)[..., :T, :] for a in p))


def in_classes(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, step: int, *, back: int, ahead: int, hole: int = -1) -> Part:
    """``band`` among the tokens of one residue modulo ``step``; reaches count in steps."""
    if valid is None and q.shape[-2] % step:
        valid = torch.ones(1, 1, q.shape[-2], dtype=torch.bool, device=q.device)  # so that what fills up the last line is not
    by_class = None if valid is None else classes(valid[..., None], step).squeeze(-1)
    qc, kc, vc = (classes(a, step) for a in (q, k, v))
    return unclasses(band(qc, kc, vc, by_class, back=back, ahead=ahead, hole=hole), q.shape[-2])
