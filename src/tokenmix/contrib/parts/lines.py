"""Softmax attention inside lines and blocks of tokens: tables of which tokens form a line, and the attention itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...functional.layout.positions import Positions
from ...functional.sums.nonfinite import clean, marks, over_pairs
from ...kernels.precision import cast_alike, exact


class Lines(NamedTuple):
    """Hold N groups of tokens.

    Queries (N, L) and the keys (N, W) they may attend, as token indices, where T means no token. ``ok`` (N, L, W):
    which pairs meet.
    """

    queries: Tensor
    keys: Tensor
    ok: Tensor


def attend_lines(logits: Tensor, ok: Tensor, v: Tensor, mark: Tensor) -> Tensor:
    """Apply softmax over the allowed keys, times v: (..., L, W), (..., L, W) bool, (..., W, e).

    Where nothing is allowed the result is exactly 0. All inputs are finite; the marks (..., W, 1) say which were not.
    """
    some = ok.any(-1, keepdim=True)
    weights = logits.masked_fill(~(ok | ~some), float("-inf")).softmax(-1)
    return torch.where(some, weights @ v, 0.0) + over_pairs(ok, mark).to(v.dtype)


def per_head(a: Tensor, heads: int) -> Tensor:
    """View (..., T, heads * e) as (..., heads, T, e)."""
    return a.unflatten(-1, (heads, -1)).transpose(-2, -3)


@exact
def dense(q: Tensor, k: Tensor, v: Tensor, ok: Tensor, heads: int) -> Tensor:
    """Weigh every pair: q (B, T, D), k and v (B, S, D), ok (B, T, S)."""
    own, met = marks(q), marks(k, v)
    q, k, v = cast_alike(q, k, v)
    qh, kh, vh = (per_head(clean(a), heads) for a in (q * (q.shape[-1] // heads) ** -0.5, k, v))
    return attend_lines(qh @ kh.transpose(-1, -2), ok[:, None], vh, met[:, None]).transpose(1, 2).flatten(2) + own


def in_lines(
    q: Tensor, k: Tensor, v: Tensor, lines: Lines, valid: Tensor | None, heads: int, prefix: int = 0
) -> Tensor:
    """Weigh the pairs inside each group only; a token is a query of exactly one group.

    valid: (B, T), keys that may be attended, or None. The first ``prefix`` tokens belong to no group: they attend all
    tokens, and all tokens attend them.
    """
    T, N = q.shape[1], lines.queries.shape[0]
    keys, ok = lines.keys, (lines.ok & (lines.keys < T)[:, None]).expand(-1, lines.queries.shape[1], -1)
    if prefix:
        keys = torch.cat([torch.arange(prefix, device=q.device).expand(N, prefix), keys], 1)
        ok = torch.cat([ok.new_ones(N, ok.shape[1], prefix), ok], 2)
    ok = ok[None, :, None]
    if valid is not None:
        ok = ok & gather_lines(valid[..., None], keys)[..., 0][:, :, None, None]
    scaled, met = clean(q) * (q.shape[-1] // heads) ** -0.5, gather_lines(marks(k, v), keys)[:, :, None]
    # (B, N, heads, L or W, e)
    qh, kh, vh = (
        per_head(gather_lines(a, at), heads) for a, at in ((scaled, lines.queries), (clean(k), keys), (clean(v), keys))
    )
    y = attend_lines(qh @ kh.transpose(-1, -2), ok, vh, met).transpose(2, 3).flatten(3).flatten(1, 2)[
        :, token_slots(lines.queries, T)
    ] + marks(q)
    if prefix == 0:
        return y
    every = torch.ones(1, 1, T, dtype=torch.bool, device=q.device) if valid is None else valid[:, None]
    return torch.cat([dense(q[:, :prefix], k, v, every, heads), y[:, prefix:]], 1)


def gather_lines(a: Tensor, index: Tensor) -> Tensor:
    """Gather a (B, T, C) at index (N, L): (B, N, L, C); zero where the index is T."""
    padded = torch.cat([a, a.new_zeros(a.shape[0], 1, a.shape[2])], 1)
    return padded[:, index]


def token_slots(queries: Tensor, T: int) -> Tensor:
    """Return the slot of each token 0..T-1 in the flattened groups (T,)."""
    flat = queries.flatten()
    spots = torch.arange(flat.shape[0], device=flat.device)
    return torch.zeros(T + 1, dtype=torch.long, device=flat.device).scatter(0, flat, spots)[:T]


class Raster(NamedTuple):
    """Hold the layout of tokens: a grid after ``prefix`` tokens, or an endless raster of lines of ``width`` tokens."""

    grid: tuple[int, ...] | None
    width: int | None
    prefix: int

    def cells(self, T: int, device: torch.device) -> Tensor:
        """Return the grid filled with token indices, and with T where the last line of a sequence ends early."""
        if self.grid is not None:
            return torch.arange(self.prefix, T, device=device).view(self.grid)
        assert self.width is not None
        lines = -(-T // self.width)
        return torch.arange(lines * self.width, device=device).clamp_max(T).view(lines, self.width)

    def positions(
        self, positions: Positions | None, starts: Tensor | None, T: int, S: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return positions of the queries (B or 1, T) and of the keys (B or 1, S); negative before a row's start."""
        if positions is None:
            rows, cols = torch.arange(T, device=device)[None], torch.arange(S, device=device)[None]
            return (rows, cols) if starts is None else (rows - starts[:, None], cols - starts[:, None])
        return positions if isinstance(positions, tuple) else (positions, positions)

    def with_prefix(self, near: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Extend ``near`` (B, T, S), which holds where both tokens are on the grid, to all tokens.

        True where one token is of the prefix, False where one comes before the start.
        """
        first = (rows < self.prefix)[:, :, None] | (cols < self.prefix)[:, None]
        return (near | first) & (rows >= 0)[:, :, None] & (cols >= 0)[:, None]


def coordinates(positions: Tensor, raster: Raster) -> Tensor:
    """Return the cell (..., axes) of each position. Prefix tokens get an arbitrary cell.

    On a grid the cell is looked up, because inductor fails on indices computed with // and %.
    """
    if raster.grid is not None:
        axes = torch.meshgrid(*(torch.arange(n, device=positions.device) for n in raster.grid), indexing="ij")
        return torch.stack(axes, -1).flatten(0, -2)[(positions - raster.prefix).clamp_min(0)]
    assert raster.width is not None
    row = torch.div(positions, raster.width, rounding_mode="floor")
    return torch.stack([row, positions - row * raster.width], -1)


def map_tokens(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute weight y + bias for each token; a non-finite token stays so and affects no gradient but its own."""
    return clean(y) @ weight.T + bias + marks(y)
