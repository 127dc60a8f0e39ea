"""Softmax attention over a pattern of pairs, by blocks: no T x T tensor is made where the pattern has structure.

A row's softmax is assembled from parts, sums over disjoint sets of keys, each under a maximum of its own. Inside,
tensors are (..., T, e) in float32 or better, queries already scaled, keys and values zero where ``valid`` is False;
True = may be attended. All numbers are finite: non-finite ones are hidden and marked by NaN in one more channel, the
last of queries, values and ``num``, which ``ratio`` adds to its result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError
from ...kernels.backend import Backend, choose
from ...kernels.precision import at_least_float32
from ..sums.nonfinite import clean, marks, over_pairs
from .checks import check_qkv
from .heads import by_head
from .masks import allowed, zero_masked
from .positions import Positions, first_true

FLOOR = -1e30  # the maximum over no keys: finite, so that differences are finite too
LEAST = 16  # smallest block: below it the overhead costs more than the skipped pairs save
Pairs = Callable[[Tensor, Tensor], Tensor]
ByDistance = Callable[[Tensor], Tensor]
"""A bias by distance: it maps integers t - s of any shape to (heads, *shape)."""


class PartialSums(NamedTuple):
    """Hold sums over some of the keys.

    num = sum e^(logit - top) v and the marks met (..., T, e + 1), den = sum e^(logit - top) (..., T, 1); top (..., T,
    1) is outside the graph.
    """

    top: Tensor
    num: Tensor
    den: Tensor


class Ready(NamedTuple):
    """Hold the common inputs: q and v (B, H, T, e + 1), k (B, H, T, e), valid (B, 1, T) or None if all keys are.

    added: what is added to the logits of the heads by distance, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor | None
    added: ByDistance | None = None


def of_heads(r: Ready, heads: list[int] | slice) -> Ready:
    """Return the inputs of some of the heads; a slice copies nothing."""
    added = r.added
    some = None if added is None else lambda far: added(far)[heads]
    return Ready(r.q[:, heads], r.k[:, heads], r.v[:, heads], r.valid, some)


def check(who: str, q: Tensor, k: Tensor, v: Tensor, heads: int, backend: Backend, **counts: int) -> None:
    """Refuse shapes that do not fit together and counts below 1."""
    choose(who, backend, q)
    check_qkv(who, q, k, v, heads, False, None)
    for name, n in counts.items():
        if not isinstance(n, int) or n < 1:
            raise MixerError(f"{who}: {name} must be an integer >= 1, got {n!r}.")


def split(a: Tensor, heads: int) -> Tensor:
    """Split (B, T, H e) into heads (B, H, T, e) in float32 or better."""
    return by_head(at_least_float32(a), heads)


def prepare_blocks(
    q: Tensor, k: Tensor, v: Tensor, heads: int, key_mask: Tensor | None, added: ByDistance | None = None
) -> Ready:
    """Split heads, scale queries by 1 / sqrt(e), and set masked keys and values to zero whatever they hold."""
    k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    own, met = marks(q)[:, None], marks(k, v)[:, None]
    q, k, v = (split(clean(a), heads) for a in (q, k, v))
    q, v = (
        torch.cat([a, m.to(a.dtype).expand(-1, heads, -1, -1)], -1)
        for a, m in ((q * q.shape[-1] ** -0.5, own), (v, met))
    )
    return Ready(q, k, v, None if key_mask is None else key_mask[:, None], added)


def merge_heads(y: Tensor, like: Tensor) -> Tensor:
    """Merge the heads of (B, H, T, e) into (B, T, H e) in the dtype of ``like``."""
    return y.transpose(1, 2).flatten(2).to(like.dtype)


def part_of(q: Tensor, k: Tensor, v: Tensor, ok: Tensor, added: Tensor | None = None) -> PartialSums:
    """Sum for each query over the keys that ok, broadcast to (..., T, S), allows.

    q (..., T, e + 1), k (..., S, e) and v (..., S, e + 1); added is what is added to the logits, or None.
    """
    logits = products(q, k)
    return sums_of(logits if added is None else logits + added.to(logits.dtype), ok, q, v)


def added_between(added: ByDistance | None, far: Tensor, reach: int) -> Tensor | None:
    """Return what a bias adds at distances t - s of at most ``reach`` either way, computed once for each distance.

    Returns:
        (heads, *far.shape), or None without a bias.
    """
    if added is None:
        return None
    every = added(torch.arange(-reach, reach + 1, device=far.device))
    return every.index_select(1, (far + reach).flatten()).unflatten(1, far.shape)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Compute the logits of all pairs, (..., T, S)."""
    return q[..., :-1] @ k.mT


def sums_of(logits: Tensor, ok: Tensor, q: Tensor, v: Tensor) -> PartialSums:
    """Compute ``part_of`` from the logits; of the queries only the marks are read."""
    logits = logits.masked_fill(~ok, float("-inf"))
    top = logits.detach().amax(-1, keepdim=True).clamp_min(FLOOR)
    weights = torch.exp(logits - top)
    met = over_pairs(ok, v[..., -1:]).to(v.dtype) + q[..., -1:]
    return PartialSums(top, torch.cat([weights @ v[..., :-1], met], -1), weights.sum(-1, keepdim=True))


def ratio(*parts: PartialSums) -> Tensor:
    """Divide num by den over all parts together, giving exactly 0 where there are no keys."""
    first, *rest = parts
    num, den = first.num, first.den
    if rest:
        top = reduce(torch.maximum, [p.top for p in parts])
        factors = [torch.exp(p.top - top) for p in parts]
        num = sum((p.num * f for p, f in zip(rest, factors[1:], strict=True)), num * factors[0])
        den = sum((p.den * f for p, f in zip(rest, factors[1:], strict=True)), den * factors[0])
    return num[..., :-1] / torch.where(den > 0, den, 1.0) + num[..., -1:]


def dense(r: Ready, ok: Tensor, far: Tensor) -> Tensor:
    """Compute the masked T x S form, for patterns without structure.

    ok (B, T, S) or (B, H, T, S); far (B, T, S) holds the distances t - s.
    """
    added = None if r.added is None else r.added(far).transpose(0, 1)
    return ratio(part_of(r.q, r.k, r.v, ok[:, None] if ok.ndim == 3 else ok, added))


def pairs_of(
    positions: Positions, q: Tensor, k: Tensor, *, causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of the dense form.

    Positions of the queries (B, T, 1) and of the keys (B, 1, S), and the pairs that all masks allow (B, T, S).
    """
    rows, cols = positions if isinstance(positions, tuple) else (positions, positions)
    ok = allowed(
        q.shape[0], q.shape[1], k.shape[1], causal=causal, key_mask=key_mask, attn_mask=attn_mask, device=q.device
    )
    return rows[:, :, None], cols[:, None, :], ok


def own_positions(q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return the index minus the index of the first True of the key mask, (B, T); negative before it."""
    if q.shape[1] != k.shape[1]:
        sizes = f"{q.shape[1]} queries and {k.shape[1]} keys"
        raise MixerError(f"a pattern over {sizes} needs positions=(query positions, key positions).")
    index = torch.arange(k.shape[1], device=k.device).expand(k.shape[:2])
    return index if key_mask is None else index - first_true(key_mask)


def blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    added: ByDistance | None,
    size: int,
    behind: int,
    before: int,
    pairs: Pairs,
) -> PartialSums:
    """Attend from each block of ``size`` queries to the keys nearby that ``pairs`` allows.

    These are the keys of its own block, of the ``behind`` blocks before it and of the ``before`` blocks after it.
    pairs(rows (n, size, 1), cols (n, 1, m size)) takes indices and returns bool. added(distances (1, size, m size)) is
    what is added to the logits, broadcastable to (B, H, n, size, m size); distances are alike in all blocks. Time
    and memory O(T m size), with m = behind + 1 + before.
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
    part = part_of(qb, kb, vb, ok, None if added is None else added(rows[:1] - cols[:1]))
    return PartialSums(*(a.flatten(-3, -2)[..., :N, :] for a in part))


def band(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    added: ByDistance | None,
    *,
    back: int,
    ahead: int,
    hole: int = -1,
) -> PartialSums:
    """Attend to keys s with t - back <= s <= t + ahead and |t - s| > hole; ``added`` as in ``blockwise``."""
    N = q.shape[-2]
    size = min(max(back, ahead, LEAST), N)

    def pairs(rows: Tensor, cols: Tensor) -> Tensor:
        ok = (cols >= rows - back) & (cols <= rows + ahead)
        return ok if hole < 0 else ok & ((cols - rows).abs() > hole)

    return blockwise(q, k, v, valid, added, size, -(-back // size), -(-ahead // size), pairs)


def cut(a: Tensor, n: int, size: int) -> Tensor:
    """Cut (..., N, e) into blocks (..., n, size, e), with zeros or False after the end."""
    short = n * size - a.shape[-2]
    if torch.compiler.is_dynamo_compiling() or short:  # tells the compiler of a free length that n * size rows exist
        a = torch.cat([a, a.new_zeros(*a.shape[:-2], short, a.shape[-1])], -2)
    return a.unflatten(-2, (n, size))


def neighbours(a: Tensor, behind: int, before: int) -> Tensor:
    """Lay blocks i - behind .. i + before side by side: (..., n, size, e) -> (..., n, m size, e).

    Missing blocks are zeros or False.
    """
    if behind == before == 0:
        return a
    n = a.shape[-3]
    edges = [a.new_zeros(*a.shape[:-3], count, *a.shape[-2:]) for count in (behind, before)]
    wide = torch.cat([edges[0], a, edges[1]], -3)
    return torch.cat([wide[..., j : j + n, :, :] for j in range(behind + before + 1)], -2)


def classes(a: Tensor, step: int) -> Tensor:
    """Group (..., T, e) into (..., step, n, e): the tokens of each residue of the position modulo ``step``."""
    if step == 1:
        return a[..., None, :, :]
    return cut(a, -(-a.shape[-2] // step), step).transpose(-3, -2)


def unclasses(p: PartialSums, T: int) -> PartialSums:
    """Restore the order of positions."""
    return PartialSums(*(a.transpose(-3, -2).flatten(-3, -2)[..., :T, :] for a in p))


def in_classes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    added: ByDistance | None,
    step: int,
    *,
    back: int,
    ahead: int,
    hole: int = -1,
) -> PartialSums:
    """Apply ``band`` among the tokens of one residue modulo ``step``; reaches count in steps."""
    if valid is None and q.shape[-2] % step:
        # the padding that completes the last line must not count as valid
        valid = torch.ones(1, 1, q.shape[-2], dtype=torch.bool, device=q.device)
    by_class = None if valid is None else classes(valid[..., None], step).squeeze(-1)
    qc, kc, vc = (classes(a, step) for a in (q, k, v))
    apart = None if added is None else lambda steps: added(step * steps)[:, None]  # (H, 1, ...): alike in all classes
    return unclasses(band(qc, kc, vc, by_class, apart, back=back, ahead=ahead, hole=hole), q.shape[-2])
