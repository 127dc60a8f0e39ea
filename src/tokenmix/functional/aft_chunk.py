"""One chunk of a causal AFT sequence: what the new tokens see of the past (sums, a ring, a history) and of each other."""

from __future__ import annotations

import torch
from torch import Tensor

from ._band import causal_sums
from ._gates import gated
from ._sums import NEG, Sums, literal, merge, over_all, over_visible, prefix_sums, ratio
from ._weights import Dense

PIECE = 512  # tokens mixed at once: bounds the (L, keys) weights of a long chunk


def empty_sums(batch: int, keys: int, features: int, *, device: torch.device | str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over nothing: (m (B, keys), num (B, features), den (B, keys)), in float64 whatever the model's dtype."""
    zero = torch.zeros(batch, features, device=device, dtype=torch.float64)
    none = torch.zeros(batch, keys, device=device, dtype=torch.float64)
    return none + NEG, zero, none


def merge_sums(earlier: tuple[Tensor, Tensor, Tensor], later: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over two adjacent stretches; with one key per head, num keeps its features."""
    heads = earlier[0].shape[-1]
    m, num, den = merge(_lift(earlier, heads), _lift(later, heads))
    return m.flatten(1), num.flatten(1), den.flatten(1)


def aft_simple_chunk(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor, Tensor], *, key_mask: Tensor | None, gate: str | None):
    """AFT-simple over L new tokens after ``past``: outputs (B, L, D) and the sums after them."""
    kd, vd, live = _heads(k, v, key_mask)
    total = merge(prefix_sums(kd, vd, live), _lift(past, 1))
    m, num, den = (a[:, 0, -1] for a in total)
    return gated(q, ratio(total)[:, 0], gate), (m, num, den)


def read_sums(q: Tensor, past: tuple[Tensor, Tensor, Tensor], *, gate: str | None) -> Tensor:
    """Queries over finished sums: the streaming form over a context."""
    return gated(q, ratio(_lift(past, 1))[:, 0], gate)


def aft_chunk(
    q: Tensor,
    new: tuple[Tensor, Tensor, Tensor],
    kept: tuple[Tensor, Tensor, Tensor],
    w: Tensor,
    *,
    far: tuple[Tensor, Tensor, Tensor] | None = None,
    inside: Tensor | None = None,
    gate: str | None,
) -> Tensor:
    """L new tokens over R kept keys, each other (causally), and the sums of all keys older than those, which weigh exp(0).

    Args:
        q: (B, L, D). new, kept: keys (B, L or R, h), values (B, L or R, D), live (B, L or R) bool; h = D, or the number of heads.
        w: log-weights (B or 1, heads or 1, L, R + L).
        inside: (B or 1, 1, L, R + L), the only pairs that count; then there is no far past.
    """
    (kn, vn, ln), (kr, vr, lr) = new, kept
    R, L, w = kr.shape[1], kn.shape[1], w.double()
    kd, vd, live = _heads(torch.cat([kr, kn], 1), torch.cat([vr, vn], 1), torch.cat([lr, ln], 1))
    assert live is not None
    if inside is not None:
        seen = inside & torch.ones(L, R + L, dtype=torch.bool, device=q.device).tril(R) & (live > 0).transpose(-1, -2)
        return gated(q, _flat(literal(kd, vd, w, seen)), gate)
    if L == 1:
        total = over_visible(kd, vd, w, live)
    else:
        total = causal_sums(kd[:, :, R:], vd[:, :, R:], Dense(w[..., R:]), live[:, :, R:])
        if R:
            total = merge(total, over_visible(kd[:, :, :R], vd[:, :, :R], w[..., :R], live[:, :, :R]))
    if far is not None:
        total = merge(total, _lift(far, kd.shape[1]))
    return gated(q, _flat(ratio(total)), gate)


def absorb(far: tuple[Tensor, Tensor, Tensor], k: Tensor, v: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums after the keys (B, n, h) that leave the ring have joined them."""
    if k.shape[1] == 0:
        return far
    kd, vd, alive = _heads(k, v, live)
    m, num, den = merge(_lift(far, kd.shape[1]), over_all(kd, vd, alive))
    return m.flatten(1), num.flatten(1), den.flatten(1)


def _heads(k: Tensor, v: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(B, S, h) and (B, S, D) as float64 (B, heads, S, c'), (B, heads, S, c): one head with a key per feature when h = D."""
    if k.shape[-1] == v.shape[-1]:
        k, v = k[:, None].double(), v[:, None].double()
    else:
        k, v = k.double().transpose(1, 2)[..., None], v.double().unflatten(-1, (k.shape[-1], -1)).transpose(1, 2)
    if live is None:
        return k, v, None
    keep = live[:, None, :, None]
    return torch.where(keep, k, NEG), torch.where(keep, v, 0.0), keep.double()


def _lift(past: tuple[Tensor, Tensor, Tensor], heads: int) -> Sums:
    """Flat sums (B, h), (B, D), (B, h) as one row (B, heads, 1, c)."""
    m, num, den = past
    if m.shape[-1] == num.shape[-1]:
        heads = 1
    return Sums(*(a.double().unflatten(-1, (heads, -1))[:, :, None] for a in (m, num, den)))


def _flat(y: Tensor) -> Tensor:
    """(B, heads, L, c) -> (B, L, D)."""
    return y.transpose(1, 2).flatten(2)
