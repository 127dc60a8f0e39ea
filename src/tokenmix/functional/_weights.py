"""Log-weights w_{t,s} of query t for key s, read block by block so that no form ever holds more than it needs.

Every source answers two questions: ``blocks(size, offset)``, the (size, size) blocks of query block i for key block i - offset, for every i that has
one; and ``slab(rows, cols)``, one rectangle. Both are float64, with leading dims that broadcast against (batch, heads).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Weights(Protocol):
    """A source of log-weights. ``uniform``: the block is the same for every i, and ``blocks`` gives it once."""

    uniform: bool

    def blocks(self, size: int, offset: int) -> Tensor:
        """(..., n - |offset|, size, size)."""

    def slab(self, rows: slice, cols: slice) -> Tensor:
        """(..., rows, cols)."""


class Dense:
    """w (..., T, S) as a tensor."""

    uniform = False

    def __init__(self, w: Tensor):
        self.w = w

    def blocks(self, size: int, offset: int) -> Tensor:
        w = F.pad(self.w, (0, -self.w.shape[-1] % size, 0, -self.w.shape[-2] % size))
        w = w.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
        return w.diagonal(-offset, -4, -2).movedim(-1, -3).double()

    def slab(self, rows: slice, cols: slice) -> Tensor:
        return self.w[..., rows, cols].double()


class Factors:
    """w = u v^T with u (..., T, r) and v (..., S, r); T x S is never formed."""

    uniform = False

    def __init__(self, u: Tensor, v: Tensor):
        self.u, self.v = u, v

    def blocks(self, size: int, offset: int) -> Tensor:
        u, v = (F.pad(a, (0, 0, 0, -a.shape[-2] % size)).unflatten(-2, (-1, size)).double() for a in (self.u, self.v))
        n = u.shape[-3]
        u, v = (u[..., offset:, :, :], v[..., : n - offset, :, :]) if offset >= 0 else (u[..., :offset, :, :], v[..., -offset:, :, :])
        return u @ v.transpose(-1, -2)

    def slab(self, rows: slice, cols: slice) -> Tensor:
        return self.u[..., rows, :].double() @ self.v[..., cols, :].double().transpose(-1, -2)


class Toeplitz:
    """w_{t,s} = taps[s - t + centre] inside the taps' reach, 0 outside; taps (..., h, n)."""

    uniform = True

    def __init__(self, taps: Tensor, centre: int):
        self.taps, self.centre = taps, centre

    def _at(self, offset: Tensor) -> Tensor:
        tap = offset + self.centre
        known = (tap >= 0) & (tap < self.taps.shape[-1])
        w = self.taps.double()[..., tap.clamp(0, self.taps.shape[-1] - 1)]
        return torch.where(known, w, 0.0)

    def blocks(self, size: int, offset: int) -> Tensor:
        i = torch.arange(size, device=self.taps.device)
        return self._at(i - i[:, None] - offset * size)[..., None, :, :]

    def slab(self, rows: slice, cols: slice) -> Tensor:
        t, s = (torch.arange(a.start, a.stop, device=self.taps.device) for a in (rows, cols))
        return self._at(s - t[:, None])


class Windowed:
    """Another source where low <= s - t <= high, and 0 outside."""

    def __init__(self, source: Weights, low: int, high: int):
        self.source, self.low, self.high, self.uniform = source, low, high, source.uniform

    def _cut(self, w: Tensor, offset: Tensor) -> Tensor:
        return torch.where((offset >= self.low) & (offset <= self.high), w, 0.0)

    def blocks(self, size: int, offset: int) -> Tensor:
        w = self.source.blocks(size, offset)
        i = torch.arange(size, device=w.device)
        return self._cut(w, i - i[:, None] - offset * size)

    def slab(self, rows: slice, cols: slice) -> Tensor:
        w = self.source.slab(rows, cols)
        t, s = (torch.arange(a.start, a.stop, device=w.device) for a in (rows, cols))
        return self._cut(w, s - t[:, None])
