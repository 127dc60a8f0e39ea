"""One chunk of a causal AFT sequence: what the new tokens see of the past (sums, a ring, a history) and of each other.

The past is carried as flat tensors (m (B, h), num (B, D), den (B, h)) in units of exp(m), with h = D, or the number of heads where a head has one key
for all its features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._band import causal_sums
from ._gates import gated
from ._sums import FLOOR, Sums, literal, merge, narrow, over_all, over_visible, prefix_sums, ratio_of, wide
from ._weights import Dense

PIECE = 512  # tokens mixed at once: bounds the (L, keys) weights of a long chunk
Past = tuple[Tensor, Tensor, Tensor]


def empty_past(batch: int, keys: int, features: int, *, device: torch.device | str | None = None) -> Past:
    """The sums over nothing, in float64 whatever the model's dtype."""
    none = torch.zeros(batch, keys, device=device, dtype=torch.float64)
    return none + FLOOR, torch.zeros(batch, features, device=device, dtype=torch.float64), none


def merge_past(earlier: Past, later: Past) -> Past:
    """The sums over two adjacent stretches."""
    return _flat(merge(_lift(earlier, 1), _lift(later, 1)))


def absorb(past: Past, k: Tensor, v: Tensor, live: Tensor | None, *, heads: int = 1) -> Past:
    """The sums after keys (B, n, h) and values (B, n, D) have joined them with weight 0."""
    return past if k.shape[1] == 0 else _flat(merge(_lift(past, heads), over_all(*wide(k, v, live, heads))))


def aft_simple_chunk(q: Tensor, k: Tensor, v: Tensor, past: Past, *, key_mask: Tensor | None, gate: str | None) -> tuple[Tensor, Past]:
    """AFT-simple over L new tokens after ``past``: outputs (B, L, D) and the sums after them."""
    total = merge(prefix_sums(*wide(k, v, key_mask, 1)), _lift(past, 1))
    last = Sums(total.m[..., -1:, :], total.lift[..., -1:, :], total.acc[..., -1:, :, :])
    return gated(q, narrow(ratio_of(total)), gate), _flat(last)


def read_past(q: Tensor, past: Past, *, gate: str | None) -> Tensor:
    """Queries over finished sums: the streaming form over a context."""
    return gated(q, narrow(ratio_of(_lift(past, 1))), gate)


def aft_chunk(
    q: Tensor, new: Past, kept: Past, w: Tensor, *, heads: int = 1, far: Past | None = None, inside: Tensor | None = None, gate: str | None
) -> Tensor:
    """L new tokens over R kept keys, each other (causally), and the sums of all keys older than those, which weigh exp(0).

    Args:
        q: (B, L, D). new, kept: keys (B, L or R, h), values (B, L or R, D), live (B, L or R) bool.
        w: log-weights (B or 1, heads or 1, L, R + L).
        inside: (B or 1, 1, L, R + L), the only pairs that count; then there is no far past.
    """
    R, L = kept[1].shape[1], new[1].shape[1]
    live = torch.cat([kept[2], new[2]], 1)
    kd, vd = wide(torch.cat([kept[0], new[0]], 1), torch.cat([kept[1], new[1]], 1), live, heads)
    if inside is not None:
        seen = inside & live[:, None, None] & torch.ones(L, R + L, dtype=torch.bool, device=q.device).tril(R)
        return gated(q, narrow(literal(kd, vd, w, seen)), gate)
    if L == 1:
        total = over_visible(kd, vd, w)
    else:
        total = causal_sums(kd[..., R:, :], vd[..., R:, :, :], Dense(w[..., R:]))
        if R:
            total = merge(total, over_visible(kd[..., :R, :], vd[..., :R, :, :], w[..., :R]))
    if far is not None:
        total = merge(total, _lift(far, heads))
    return gated(q, narrow(ratio_of(total)), gate)


def _lift(past: Past, heads: int) -> Sums:
    """Flat sums as one row (B, heads, 1, g + 1, c')."""
    m, num, den = (a.double() for a in past)
    m = m.unflatten(-1, (heads, -1))[:, :, None]
    num = num.unflatten(-1, (heads, -1, m.shape[-1]))
    return Sums(m, torch.zeros_like(m), torch.cat([num, den.unflatten(-1, (heads, 1, -1))], 2)[:, :, None])


def _flat(s: Sums) -> Past:
    """One row of sums as flat tensors in units of exp(m)."""
    acc = s.acc * torch.exp(s.lift)[..., None, :]
    return s.m.flatten(1), acc[..., :-1, :].flatten(1), acc[..., -1, :].flatten(1)
