"""Softmax attention inside lines and blocks of tokens: tables of which tokens form a line, and the attention in each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..sums.nonfinite import clean, marks, over_pairs
from ..sums.precision import alike, exact
from .positions import Positions


class Lines(NamedTuple):
    """N groups: queries (N, L) and the keys (N, W) they may attend, as token indices; T stands for no token. ``ok`` (N, L, W): which pairs meet."""

    queries: Tensor
    keys: Tensor
    ok: Tensor


def mixed(logits: Tensor, ok: Tensor, v: Tensor, mark: Tensor) -> Tensor:
    """softmax over the allowed keys, times v: (..., L, W), (..., L, W) bool, (..., W, e). Nothing allowed gives exactly 0.

    All of these are finite; the marks (..., W, 1) say what was not.
    """
    some = ok.any(-1, keepdim=True)
    weights = logits.masked_fill(~(ok | ~some), float("-inf")).softmax(-1)
    return torch.where(some, weights @ v, 0.0) + over_pairs(ok, mark).to(v.dtype)


def per_head(a: Tensor, heads: int) -> Tensor:
    """(..., T, heads * e) as (..., heads, T, e)."""
    return a.unflatten(-1, (heads, -1)).transpose(-2, -3)


@exact
def dense(q: Tensor, k: Tensor, v: Tensor, ok: Tensor, heads: int) -> Tensor:
    """Every pair weighed: q (B, T, D), k and v (B, S, D), ok (B, T, S)."""
    own, met = marks(q), marks(k, v)
    q, k, v = alike(q, k, v)
    qh, kh, vh = (per_head(clean(a), heads) for a in (q * (q.shape[-1] // heads) ** -0.5, k, v))
    return mixed(qh @ kh.transpose(-1, -2), ok[:, None], vh, met[:, None]).transpose(1, 2).flatten(2) + own


def in_lines(q: Tensor, k: Tensor, v: Tensor, lines: Lines, valid: Tensor | None, heads: int, prefix: int = 0) -> Tensor:
    """The same inside each group only; a token is a query of exactly one group.

    live: (B, T), keys that may be attended, or None. The first ``prefix`` tokens are of no group: they attend all, and all attend them.
    """
    T, N = q.shape[1], lines.queries.shape[0]
    keys, ok = lines.keys, (lines.ok & (lines.keys < T)[:, None]).expand(-1, lines.queries.shape[1], -1)
    if prefix:
        keys = torch.cat([torch.arange(prefix, device=q.device).expand(N, prefix), keys], 1)
        ok = torch.cat([ok.new_ones(N, ok.shape[1], prefix), ok], 2)
    ok = ok[None, :, None]
    if valid is not None:
        ok = ok & picked(valid[..., None], keys)[..., 0][:, :, None, None]
    scaled, met = clean(q) * (q.shape[-1] // heads) ** -0.5, picked(marks(k, v), keys)[:, :, None]
    qh, kh, vh = (per_head(picked(a, at), heads) for a, at in ((scaled, lines.queries), (clean(k), keys), (clean(v), keys)))  # (B, N, heads, L or W, e)
    y = mixed(qh @ kh.transpose(-1, -2), ok, vh, met).transpose(2, 3).flatten(3).flatten(1, 2)[:, token_slots(lines.queries, T)] + marks(q)
    if prefix == 0:
        return y
    every = torch.ones(1, 1, T, dtype=torch.bool, device=q.device) if valid is None else valid[:, None]
    return torch.cat([dense(q[:, :prefix], k, v, every, heads), y[:, prefix:]], 1)


def picked(a: Tensor, index: Tensor) -> Tensor:
    """a (B, T, C) at index (N, L): (B, N, L, C); zero where the index is T."""
    padded = torch.cat([a, a.new_zeros(a.shape[0], 1, a.shape[2])], 1)
    return padded[:, index]


def token_slots(queries: Tensor, T: int) -> Tensor:
    """Where each token 0..T-1 stands in the flattened groups (T,)."""
    flat = queries.flatten()
    spots = torch.arange(flat.shape[0], device=flat.device)
    return torch.zeros(T + 1, dtype=torch.long, device=flat.device).scatter(0, flat, spots)[:T]


class Raster(NamedTuple):
    """Where tokens stand: on a grid after ``prefix`` tokens, or, ``width`` to a line, in raster order without end."""

    grid: tuple[int, ...] | None
    width: int | None
    prefix: int

    def cells(self, T: int, device: torch.device) -> Tensor:
        """The grid filled with token indices; T where the last line of a sequence ends early."""
        if self.grid is not None:
            return torch.arange(self.prefix, T, device=device).view(self.grid)
        assert self.width is not None
        lines = -(-T // self.width)
        return torch.arange(lines * self.width, device=device).clamp_max(T).view(lines, self.width)

    def positions(self, positions: Positions | None, starts: Tensor | None, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Positions of the queries (B or 1, T) and of the keys (B or 1, S); negative before a row's start."""
        if positions is None:
            rows, cols = torch.arange(T, device=device)[None], torch.arange(S, device=device)[None]
            return (rows, cols) if starts is None else (rows - starts[:, None], cols - starts[:, None])
        return positions if isinstance(positions, tuple) else (positions, positions)

    def with_prefix(self, near: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """``near`` (B, T, S) where both tokens are on the grid; True where one is of the prefix, False where one stands before the start."""
        first = (rows < self.prefix)[:, :, None] | (cols < self.prefix)[:, None]
        return (near | first) & (rows >= 0)[:, :, None] & (cols >= 0)[:, None]


def coordinates(positions: Tensor, raster: Raster) -> Tensor:
    """The cell (..., axes) of each position; on a grid looked up, as inductor fails on indices computed with // and %. Prefix tokens get any cell."""
    if raster.grid is not None:
        axes = torch.meshgrid(*(torch.arange(n, device=positions.device) for n in raster.grid), indexing="ij")
        return torch.stack(axes, -1).flatten(0, -2)[(positions - raster.prefix).clamp_min(0)]
    assert raster.width is not None
    row = torch.div(positions, raster.width, rounding_mode="floor")
    return torch.stack([row, positions - row * raster.width], -1)


def mapped(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """weight y + bias of each token; one that is not finite stays so and spoils no gradient but its own."""
    return clean(y) @ weight.T + bias + marks(y)
