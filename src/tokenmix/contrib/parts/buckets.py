"""Attention among tokens of one bucket: sorted, so that tokens that may meet are adjacent, or dense, for few queries.

Each token carries one integer code per round, ``bucket * stride + number``, where the number is its chunk or its rank
inside the bucket. A query meets a key in a round when 0 <= its code - the key's code <= ``reach``; the stride keeps
different buckets further apart than that. A rank counts the valid tokens of the bucket that came earlier, so codes
depend on the past only. Where a token is stored, which does depend on the future, decides nothing.

Shapes: (B, H, T, e) for queries, keys and values; (B, H, R, T) for codes of R rounds. Masked tokens have the code
``MASKED_CODE``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MASKED_CODE = -4  # the code of a masked token
LOWEST = -1e30  # below every logit, and finite: no difference of two maxima is NaN


class Sums(NamedTuple):
    """Hold partial sums in units of exp(m).

    m (B, H, T, 1) is the largest logit met so far; num (B, H, T, e) and den (B, H, T, 1) are the sums.
    """

    m: Tensor
    num: Tensor
    den: Tensor


class Order(NamedTuple):
    """Hold tokens sorted by (bucket, time), masked ones last, all (..., T).

    ``token`` at each place, ``place`` of each token, and its ``rank`` among the valid tokens of its bucket.
    """

    token: Tensor
    place: Tensor
    rank: Tensor


def sort_by_bucket(buckets: Tensor, valid: Tensor, count: int) -> Order:
    """Sort by (bucket, time); buckets (..., T) in 0..count-1, valid of the same shape.

    All sort keys differ, so the order does not depend on how ties are sorted.
    """
    T = buckets.shape[-1]
    time = torch.arange(T, device=buckets.device).expand(buckets.shape)
    keys = torch.where(valid, buckets, count)
    token = (keys * T + time).argsort(-1)
    place = torch.zeros_like(token).scatter(-1, token, time)
    sizes = torch.zeros(*keys.shape[:-1], count + 1, dtype=torch.long, device=keys.device).scatter_add(
        -1, keys, torch.ones_like(keys)
    )
    return Order(token, place, place - (sizes.cumsum(-1) - sizes).gather(-1, keys))


def bucket_codes(buckets: Tensor, number: Tensor, valid: Tensor, stride: int) -> Tensor:
    """Return the codes: bucket * stride + number, MASKED_CODE where not valid."""
    return torch.where(valid, buckets * stride + number, MASKED_CODE)


def blocks(a: Tensor, size: int, fill: float, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Cut a (..., T, c) into blocks (..., N, size, c), and lay the neighbours of each block beside it.

    The second tensor holds the blocks ``before`` .. ``after`` around each, (..., N, (before + 1 + after) size, c).
    """
    N = -(-a.shape[-2] // size)
    own = F.pad(a, (0, 0, 0, N * size - a.shape[-2]), value=fill).unflatten(-2, (N, size))
    wide = F.pad(own, (0, 0, 0, 0, before, after), value=fill)
    return own, torch.cat([wide[..., i : i + N, :, :] for i in range(before + 1 + after)], -2)


def pairs_in_reach(queries: Tensor, keys: Tensor, reach: int) -> Tensor:
    """Return whether query t attends to key s, (..., t, s), from codes (..., t) and (..., s)."""
    apart = queries[..., :, None] - keys[..., None, :]
    return (apart >= 0) & (apart <= reach) & (keys >= 0)[..., None, :]


def in_order(time_q: Tensor, time_k: Tensor, *, causal: bool, itself: bool) -> Tensor:
    """Return whether t may attend s, from times (..., t) and (..., s).

    s must not be later when ``causal``, and must not be t unless ``itself``.
    """
    apart = time_q[..., :, None] - time_k[..., None, :]
    ok = apart >= 0 if causal else torch.ones_like(apart, dtype=torch.bool)
    return ok if itself else ok & (apart != 0)


def sums_of(q: Tensor, k: Tensor, v: Tensor, ok: Tensor) -> Sums:
    """Sum exp(q . k) v and exp(q . k) over the keys each row may attend.

    q (..., t, e), k and v (..., s, e), ok (..., t, s).
    """
    logits = torch.where(ok, (q @ k.transpose(-1, -2)).to(q.dtype), LOWEST)
    m = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else logits.new_full((*logits.shape[:-1], 1), LOWEST)
    weights = torch.where(ok, torch.exp(logits - m), 0.0)
    return Sums(m, (weights @ v).to(q.dtype), weights.sum(-1, keepdim=True))


def merge(a: Sums, b: Sums) -> Sums:
    """Add the sums over two disjoint sets of keys."""
    m = torch.maximum(a.m, b.m)
    x, y = torch.exp(a.m - m), torch.exp(b.m - m)
    return Sums(m, a.num * x + b.num * y, a.den * x + b.den * y)


def ratio(s: Sums, otherwise: Tensor | float = 0.0) -> Tensor:
    """Divide num by den, giving ``otherwise`` where nothing was met."""
    some = s.den > 0
    return torch.where(some, s.num / torch.where(some, s.den, 1.0), otherwise)


def attend_sorted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor,
    order: Order,
    *,
    size: int,
    before: int,
    after: int,
    reach: int,
    causal: bool,
    itself: bool,
) -> Sums:
    """Compute the sums of the last round of ``codes`` over the keys that no earlier round has met.

    The tokens are in ``order`` (B, H, T) of that round. In this order, tokens that meet must be at most ``before``
    blocks of ``size`` before the query's own block or ``after`` blocks after it.
    """
    token, fit = order.token, {"size": size, "before": before, "after": after}
    pick = token[..., None].expand(-1, -1, -1, q.shape[-1])
    (qs, _), (_, ks), (_, vs) = (blocks(a.gather(2, pick), fill=0.0, **fit) for a in (q, k, v))
    # the codes of all rounds, and the time
    tags = torch.cat([codes, torch.arange(token.shape[-1], device=token.device).expand_as(codes[:, :, :1])], 2)
    tags = tags.gather(3, token[:, :, None].expand_as(tags)).transpose(2, 3)
    mine, theirs = blocks(tags, fill=MASKED_CODE, **fit)
    ok = in_order(mine[..., -1], theirs[..., -1], causal=causal, itself=itself) & pairs_in_reach(
        mine[..., -2], theirs[..., -2], reach
    )
    for r in range(codes.shape[2] - 1):
        ok = ok & ~pairs_in_reach(mine[..., r], theirs[..., r], reach)
    back = order.place[..., None]
    return Sums(*(a.flatten(2, 3).gather(2, back.expand(-1, -1, -1, a.shape[-1])) for a in sums_of(qs, ks, vs, ok)))


def attend_dense(q: Tensor, k: Tensor, v: Tensor, codes: Tensor, *, reach: int, itself: bool) -> Sums:
    """Compute the same for the last L tokens alone, causal, over all S, for streaming.

    q (B, H, L, e), k and v (B, H, S, e), codes (B, H, R, S).
    """
    L, S = q.shape[2], k.shape[2]
    time = torch.arange(S, device=q.device)
    ok = in_order(time[S - L :], time, causal=True, itself=itself)
    met = pairs_in_reach(codes[:, :, :, S - L :], codes, reach).any(2)
    return sums_of(q, k, v, ok & met)
