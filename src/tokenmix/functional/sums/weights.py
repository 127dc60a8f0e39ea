"""Log-weights w_{t,s} of query t for key s, read block by block so that no form holds more than it needs.

Every source has two methods. ``blocks(size, offset, n)`` returns the (size, size) blocks of query block i for key block
i - offset, for every i < n that has one; ``slab(rows, cols)`` returns one rectangle. Leading dims broadcast against
(batch, heads). The reader converts them to float64.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout.masks import pad_zeros


class Weights(Protocol):
    """A source of log-weights. ``uniform``: the block is the same for every i, and ``blocks`` returns it once."""

    uniform: bool

    def blocks(self, size: int, offset: int, n: int) -> Tensor:
        """Return (..., n - |offset|, size, size) of the first n blocks; 0 beyond the last token."""

    def slab(self, rows: slice, cols: slice) -> Tensor:
        """Return (..., rows, cols); 0 beyond the last token."""


class Dense:
    """Log-weights w (..., T, S) as a tensor."""

    uniform = False

    def __init__(self, w: Tensor):
        self.w = w

    def blocks(self, size: int, offset: int, n: int) -> Tensor:
        w = self.slab(slice(0, n * size), slice(0, n * size)).unflatten(-1, (n, size)).unflatten(-3, (n, size))
        return w.diagonal(-offset, -4, -2).movedim(-1, -3)

    def slab(self, rows: slice, cols: slice) -> Tensor:
        short = max(0, cols.stop - self.w.shape[-1]), max(0, rows.stop - self.w.shape[-2])
        return F.pad(self.w[..., rows, cols], (0, short[0], 0, short[1])) if any(short) else self.w[..., rows, cols]


class Factors:
    """Log-weights w = u v^T with u (..., T, r) and v (..., S, r); T x S is never formed."""

    uniform = False

    def __init__(self, u: Tensor, v: Tensor):
        self.u, self.v = u, v

    def blocks(self, size: int, offset: int, n: int) -> Tensor:
        u, v = (_rows(a, slice(0, n * size)).unflatten(-2, (n, size)) for a in (self.u, self.v))
        u, v = (
            (u[..., offset:, :, :], v[..., : n - offset, :, :])
            if offset >= 0
            else (u[..., :offset, :, :], v[..., -offset:, :, :])
        )
        return u @ v.transpose(-1, -2)

    def slab(self, rows: slice, cols: slice) -> Tensor:
        return _rows(self.u, rows) @ _rows(self.v, cols).transpose(-1, -2)


def _rows(a: Tensor, rows: slice) -> Tensor:
    """Return rows of a factor in float64, with zeros beyond its end."""
    a = a[..., rows, :].double()
    return pad_zeros(a, (0, 0, 0, rows.stop - rows.start - a.shape[-2]))


class Toeplitz:
    """Log-weights w_{t,s} = taps[s - t + centre] inside the taps' reach, 0 outside; taps (..., h, n)."""

    uniform = True

    def __init__(self, taps: Tensor, centre: int):
        self.taps, self.centre = taps, centre

    def _log_weight_at(self, offset: Tensor) -> Tensor:
        tap = offset + self.centre
        known = (tap >= 0) & (tap < self.taps.shape[-1])
        w = self.taps.double()[..., tap.clamp(0, self.taps.shape[-1] - 1)]
        return torch.where(known, w, 0.0)

    def blocks(self, size: int, offset: int, n: int) -> Tensor:
        i = torch.arange(size, device=self.taps.device)
        return self._log_weight_at(i - i[:, None] - offset * size)[..., None, :, :]

    def slab(self, rows: slice, cols: slice) -> Tensor:
        t, s = (torch.arange(a.start, a.stop, device=self.taps.device) for a in (rows, cols))
        return self._log_weight_at(s - t[:, None])


class Banded:
    """Log-weights w_{t,s} = band[t, s - t + centre] inside the band's reach, 0 outside; band (..., T, n)."""

    uniform = False

    def __init__(self, band: Tensor, centre: int):
        self.band, self.centre = band, centre

    def _log_weight_at(self, rows: Tensor, offset: Tensor) -> Tensor:
        tap = offset + self.centre
        known = (tap >= 0) & (tap < self.band.shape[-1])
        w = rows.double().gather(-1, tap.clamp(0, self.band.shape[-1] - 1).expand(*rows.shape[:-1], -1))
        return torch.where(known, w, 0.0)

    def blocks(self, size: int, offset: int, n: int) -> Tensor:
        rows = F.pad(self.band, (0, 0, 0, max(0, n * size - self.band.shape[-2])))[..., : n * size, :].unflatten(
            -2, (n, size)
        )
        i = torch.arange(size, device=rows.device)
        return self._log_weight_at(rows[..., max(offset, 0) : n + min(offset, 0), :, :], i - i[:, None] - offset * size)

    def slab(self, rows: slice, cols: slice) -> Tensor:
        t, s = (torch.arange(a.start, a.stop, device=self.band.device) for a in (rows, cols))
        return self._log_weight_at(
            F.pad(self.band, (0, 0, 0, max(0, rows.stop - self.band.shape[-2])))[..., rows, :], s - t[:, None]
        )


class Windowed:
    """Another source where low <= s - t <= high, and 0 outside."""

    def __init__(self, source: Weights, low: int, high: int):
        self.source, self.low, self.high, self.uniform = source, low, high, source.uniform

    def _cut(self, w: Tensor, offset: Tensor) -> Tensor:
        return torch.where((offset >= self.low) & (offset <= self.high), w, 0.0)

    def blocks(self, size: int, offset: int, n: int) -> Tensor:
        w = self.source.blocks(size, offset, n)
        i = torch.arange(size, device=w.device)
        return self._cut(w, i - i[:, None] - offset * size)

    def slab(self, rows: slice, cols: slice) -> Tensor:
        w = self.source.slab(rows, cols)
        t, s = (torch.arange(a.start, a.stop, device=w.device) for a in (rows, cols))
        return self._cut(w, s - t[:, None])
