"""Softmax attention inside lines and blocks of tokens: tables of which tokens form a line, and the attention in each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Lines(NamedTuple):
    """N groups: queries (N, L) and the keys (N, W) they may attend, as token indices; T stands for no token. ``ok`` (N, L, W): which pairs meet."""

    queries: Tensor
    keys: Tensor
    ok: Tensor


def mixed(logits: Tensor, ok: Tensor, v: Tensor) -> Tensor:
    """softmax over the allowed keys, times v: (..., L, W), (..., L, W) bool, (..., W, e). Nothing allowed gives exactly 0."""
    some = ok.any(-1, keepdim=True)
    weights = logits.masked_fill(~(ok | ~some), float("-inf")).softmax(-1)
    return torch.where(some, weights @ v, 0.0)


def per_head(a: Tensor, heads: int) -> Tensor:
    """(..., T, heads * e) as (..., heads, T, e)."""
    return a.unflatten(-1, (heads, -1)).transpose(-2, -3)


def dense(q: Tensor, k: Tensor, v: Tensor, ok: Tensor, heads: int) -> Tensor:
    """Every pair weighed: q (B, T, D), k and v (B, S, D), ok (B, T, S)."""
    qh, kh, vh = (per_head(a, heads) for a in (q * (q.shape[-1] // heads) ** -0.5, k, v))
    return mixed(qh @ kh.transpose(-1, -2), ok[:, None], vh).transpose(1, 2).flatten(2)


def in_lines(q: Tensor, k: Tensor, v: Tensor, lines: Lines, live: Tensor | None, heads: int) -> Tensor:
    """The same inside each group only; a token is a query of exactly one group. live: (B, T), keys that may be attended, or None."""
    T = q.shape[1]
    qn, kn, vn = (picked(a, at) for a, at in ((q * (q.shape[-1] // heads) ** -0.5, lines.queries), (k, lines.keys), (v, lines.keys)))
    qh, kh, vh = (per_head(a, heads) for a in (qn, kn, vn))  # (B, N, heads, L or W, e)
    ok = (lines.ok & (lines.keys < T)[:, None])[None, :, None]
    if live is not None:
        ok = ok & picked(live[..., None], lines.keys)[..., 0][:, :, None, None]
    y = mixed(qh @ kh.transpose(-1, -2), ok, vh).transpose(2, 3).flatten(3).flatten(1, 2)
    return y[:, places_of(lines.queries, T)]


def picked(a: Tensor, index: Tensor) -> Tensor:
    """a (B, T, C) at index (N, L): (B, N, L, C); zero where the index is T."""
    padded = torch.cat([a, a.new_zeros(a.shape[0], 1, a.shape[2])], 1)
    return padded[:, index]


def places_of(queries: Tensor, T: int) -> Tensor:
    """Where each token 0..T-1 stands in the flattened groups (T,)."""
    flat = queries.flatten()
    spots = torch.arange(flat.shape[0], device=flat.device)
    return torch.zeros(T + 1, dtype=torch.long, device=flat.device).scatter(0, flat, spots)[:T]


def from_start(a: Tensor, starts: Tensor) -> Tensor:
    """a (B, T, ...) moved left by ``starts`` (B,), so that each row's position 0 stands first; what comes after the end repeats the last token."""
    T = a.shape[1]
    index = (torch.arange(T, device=a.device) + starts[:, None]).clamp_max(T - 1)
    return a.gather(1, index.view(*index.shape, *[1] * (a.ndim - 2)).expand(a.shape))


def back_to_place(a: Tensor, starts: Tensor) -> Tensor:
    """The reverse of ``from_start`` for outputs (B, T, C); tokens before a row's start get exactly 0."""
    index = torch.arange(a.shape[1], device=a.device) - starts[:, None]
    moved = a.gather(1, index.clamp_min(0)[..., None].expand(a.shape))
    return torch.where((index >= 0)[..., None], moved, 0.0)


def within(a: Tensor, starts: Tensor) -> Tensor:
    """After ``from_start``: which places (B, T) hold a token of the row."""
    return torch.arange(a.shape[1], device=a.device) + starts[:, None] < a.shape[1]
