"""Reformer: attention among tokens with equal hashes (Kitaev et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from .layout.buckets import Order, Sums, attend_dense, attend_sorted, coded, merge, ratio, sort_by_bucket
from .layout.heads import by_head
from .layout.masks import valid_mask
from .sums.nonfinite import hides, honest

TINY = 1e-12  # added to a squared length, so that a zero vector is normalised to zero


def hash_buckets(q: Tensor, rotations: Tensor, *, heads: int) -> Tensor:
    """Compute h(x) = argmax([x R; -x R]) (Andoni et al. 2015), decided in float64.

    q (B, T, D), rotations (R, heads, e, n/2) -> (B, heads, R, T) in 0..n-1.
    """
    turned = by_head(q.detach().double(), heads)[:, :, None] @ rotations.detach().double().transpose(0, 1)
    return torch.cat([turned, -turned], -1).argmax(-1)


@exact
@hides("q", "v")
def reformer(
    q: Tensor,
    v: Tensor,
    rotations: Tensor,
    *,
    heads: int,
    chunk: int,
    paper_form: bool = False,
    buckets: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s softmax_s(q_t . k_s / sqrt(e)) v_s over the tokens P_t with the hash of t.

    Keys are shared, k_s = q_s / |q_s|; P_t holds t only if it holds nothing else. P_t is the union over the rounds of
    {s: same bucket, chunk of t minus chunk of s is 0 or 1}. A token's chunk is its rank in its bucket // ``chunk``, the
    rank counting the valid tokens of the bucket before it. With ``paper_form`` it is its place in the sort of all
    tokens by (bucket, time) // ``chunk``, as published: there the borders depend on later tokens, even if ``causal``.
    The rounds are joined by log-sum-exp; a pair counts in the first round that has it, which is the paper's division by
    N_ts.

    Args:
        q: (B, T, D), queries and keys at once.
        v: (B, T, D).
        rotations: (rounds, heads, e, n/2) for n buckets.
        buckets: (B, heads, rounds, T), used instead of the hashes.

    Masked queries, and those with nothing to attend, give 0.
    """
    choose("reformer", backend, q)
    n = 2 * rotations.shape[-1]
    if q.shape[-1] % heads or rotations.shape[1:3] != (heads, q.shape[-1] // heads):
        shape = tuple(rotations.shape)
        raise MixerError(f"reformer: heads={heads} and rotations {shape} do not fit q of width {q.shape[-1]}.")
    valid = valid_mask(q, key_mask)
    buckets = hash_buckets(q, rotations, heads=heads) if buckets is None else buckets
    qh, kh, vh = _prepared(q, v, valid, heads)
    codes, order = reformer_codes(buckets, valid, chunk=chunk, count=n, paper_form=paper_form)
    before, after = (1, 0) if paper_form else (2, 0 if causal else 1)
    total: Sums | None = None
    for r in range(buckets.shape[2]):
        mine = Order(*(a[:, :, r] for a in order))
        met = attend_sorted(
            qh,
            kh,
            vh,
            codes[:, :, : r + 1],
            mine,
            size=chunk,
            before=before,
            after=after,
            reach=1,
            causal=causal,
            itself=False,
        )
        total = met if total is None else merge(total, met)
    assert total is not None
    return _joined(total, vh, valid).to(v.dtype)


def reformer_codes(
    buckets: Tensor, valid: Tensor, *, chunk: int, count: int, paper_form: bool = False
) -> tuple[Tensor, Order]:
    """Return codes (B, H, R, T) whose difference is 0 or 1 where two tokens meet, and the order of each round."""
    there = valid[:, None, None].expand_as(buckets)
    order = sort_by_bucket(buckets, there, count)
    number = torch.div(order.place if paper_form else order.rank, chunk, rounding_mode="floor")
    return coded(buckets, number, there, buckets.shape[-1] // chunk + 3), order


@exact
def reformer_chunk(
    q: Tensor, keys: Tensor, values: Tensor, buckets: Tensor, valid: Tensor, *, heads: int, chunk: int, count: int
) -> Tensor:
    """Compute the causal strict form for the last L tokens, q (B, L, D), over all S.

    keys (B, S, D) before normalisation to length 1, buckets (B, heads, R, S).
    """
    L = q.shape[1]
    codes, _ = reformer_codes(buckets, valid, chunk=chunk, count=count)

    def form(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        qh, _, _ = _prepared(q, q, valid[:, -L:], heads)
        _, kh, vh = _prepared(keys, values, valid, heads)
        return _joined(attend_dense(qh, kh, vh, codes, reach=1, itself=False), vh[:, :, -L:], valid[:, -L:])

    return honest(form, q, keys, values, causal=True, key_mask=valid)


def _prepared(q: Tensor, v: Tensor, valid: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled queries, keys of length 1 and values per head, in float32 or better, zero at masked tokens."""
    wide = sum_dtype(q)
    q, v = (torch.where(valid[..., None], a.to(wide), 0.0) for a in (q, v))
    qh = by_head(q, heads)
    return qh * qh.shape[-1] ** -0.5, qh * (qh.square().sum(-1, keepdim=True) + TINY).rsqrt(), by_head(v, heads)


def _joined(total: Sums, own: Tensor, valid: Tensor) -> Tensor:
    """Return the ratio, the token's own value where it met nothing else, 0 where it is masked; (B, T, D)."""
    return torch.where(valid[..., None], ratio(total, own).transpose(1, 2).flatten(2), 0.0)
