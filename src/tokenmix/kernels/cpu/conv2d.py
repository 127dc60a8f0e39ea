"""AFT-conv on 2-D grids in torch's own fp32 matrix products and convolutions: tensors in, tensors out, no autograd.

Every query sees every key, so one maximum per head and row of the batch is safe, and with E_ts = exp(w) the mixing is linear in X = [e^k v | e^k]:
y = (E X)_num / (E X)_den. E is never a difference: what lies outside of the filter is summed as rows above and below and, in the rows between, columns to
the left and right, all positive.

Float32 loses keys 87 below the maximum. They cannot matter while log-weights span less than ``SPAN``; else the same runs dense in float64, as the
eager form does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

DEAD, FLOOR, CAP = -(2.0 - 2.0**-23) * 2.0**127, -(2.0 - 2.0**-22) * 2.0**127, 300.0  # as in functional/_sums.py
SPAN = 60.0
FEW = 256  # tokens up to which E is cheaper as a matrix, where heads have channels enough to fill a matrix product
BLOCK = 2**24  # elements of E held at once


class Pairs(Protocol):
    """E as a linear map of X (B, T, h, c)."""

    def over(self, X: Tensor) -> Tensor:
        """E X."""

    def back(self, G: Tensor) -> Tensor:
        """E^T G."""

    def taps(self, X: Tensor, G: Tensor) -> Tensor:
        """sum G_t X_s over the pairs of each tap: (h, s, s)."""


class Matrix:
    """E row block by row block, laid out once for all rows of the batch."""

    def __init__(self, weights: Tensor, grid: tuple[int, ...], prefix: int):
        self.weights, self.size = weights, weights.shape[-1]
        self.table = F.pad(weights.flatten(1), (0, 1), value=1.0)
        cells = torch.cartesian_prod(*(torch.arange(n) for n in grid))
        self.cells = F.pad(cells, (0, 0, prefix, 0), value=-(1 << 30))  # a prefix token is far from all, and they from it

    def _rows(self) -> Iterator[tuple[slice, Tensor]]:
        T, s = len(self.cells), self.size
        step = max(1, BLOCK // (T * len(self.table)))
        for start in range(0, T, step):
            rows = slice(start, min(T, start + step))
            offset = self.cells[None] - self.cells[rows, None] + s // 2
            inside = ((offset >= 0) & (offset < s)).all(-1) & (self.cells[rows, None, 0] >= 0)
            yield rows, torch.where(inside, offset[..., 0] * s + offset[..., 1], s * s)

    def over(self, X: Tensor) -> Tensor:
        x = _columns(X)
        return _tokens(torch.cat([self.table[:, tap] @ x for _, tap in self._rows()], 1), X)

    def back(self, G: Tensor) -> Tensor:
        g, total = _columns(G), None
        for rows, tap in self._rows():
            part = self.table[:, tap].mT @ g[:, rows]
            total = part if total is None else total + part
        assert total is not None
        return _tokens(total, G)

    def taps(self, X: Tensor, G: Tensor) -> Tensor:
        x, g, total = _columns(X), _columns(G), torch.zeros_like(self.table)
        for rows, tap in self._rows():
            total.index_add_(1, tap.flatten(), (g[:, rows] @ x.mT).flatten(1))
        return total[:, :-1].view_as(self.weights)


def _columns(X: Tensor) -> Tensor:
    """(B, T, h, c) as (h, T, B c)."""
    return X.permute(2, 1, 0, 3).flatten(2)


def _tokens(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(2, (like.shape[0], -1)).permute(2, 1, 0, 3)


class Filter:
    """E as a depthwise convolution and the sums of what lies outside of it: no T x T anything."""

    def __init__(self, weights: Tensor, grid: tuple[int, ...], prefix: int):
        self.weights, self.grid, self.prefix = weights, grid, prefix

    def _maps(self, X: Tensor) -> Tensor:
        """The grid's tokens as (B, h c, H, W)."""
        return X[:, self.prefix :].flatten(2).transpose(1, 2).unflatten(2, self.grid).contiguous()

    def _both(self, X: Tensor, weights: Tensor) -> Tensor:
        P, x, half = self.prefix, self._maps(X), weights.shape[-1] // 2
        each = weights.repeat_interleave(X.shape[3], 0)[:, None]
        near = F.conv2d(x, each, padding=half, groups=x.shape[1])
        y = (near + beyond(x, half)).flatten(2).transpose(1, 2).unflatten(2, X.shape[2:])
        if not P:
            return y
        return torch.cat([X.sum(1, keepdim=True).expand(-1, P, -1, -1), y + X[:, :P].sum(1, keepdim=True)], 1)

    def over(self, X: Tensor) -> Tensor:
        return self._both(X, self.weights)

    def back(self, G: Tensor) -> Tensor:
        return self._both(G, self.weights.flip(1, 2))

    def taps(self, X: Tensor, G: Tensor) -> Tensor:
        x, g, h, s = self._maps(X), self._maps(G), len(self.weights), self.weights.shape[-1]
        like = self.weights.repeat_interleave(X.shape[3], 0)[:, None]
        found = torch.ops.aten.convolution_backward(g, x, like, None, [1, 1], [s // 2] * 2, [1, 1], False, [0, 0], x.shape[1], [False, True, False])[1]
        return found.view(h, -1, s, s).sum(1)


def beyond(x: Tensor, half: int) -> Tensor:
    """For each cell of (B, C, H, W) the sum of the cells more than ``half`` away along either axis, of positive pieces only."""
    band = F.avg_pool2d(x, (2 * half + 1, 1), 1, (half, 0), divisor_override=1)
    return _before(band, half) + _before(band.flip(3), half).flip(3) + (_before(x.sum(3, keepdim=True).mT, half) + _after(x.sum(3, keepdim=True).mT, half)).mT


def _before(x: Tensor, half: int) -> Tensor:
    """Along the last axis the sum of all entries more than ``half`` before each."""
    return F.pad(x.cumsum(-1), (half + 1, 0))[..., : x.shape[-1]]


def _after(x: Tensor, half: int) -> Tensor:
    return _before(x.flip(-1), half).flip(-1)


def _pairs(kernel: Tensor, D: int, grid: tuple[int, ...], prefix: int) -> tuple[Pairs, torch.dtype]:
    """E in the cheapest exact form, and the dtype of the sums."""
    low, high = (float(a) for a in kernel.aminmax()) if kernel.numel() else (0.0, 0.0)
    if not max(high, 0.0) - min(low, 0.0) < SPAN:
        return Matrix(torch.exp(kernel.double().clamp_max(CAP)), grid, prefix), torch.float64
    tokens, weights = prefix + grid[0] * grid[1], torch.exp(kernel.float())
    return (Matrix if tokens <= FEW and D >= 16 * len(kernel) else Filter)(weights, grid, prefix), torch.float32


def _terms(k: Tensor, v: Tensor, mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """e^(k - m) (B, T, h, 1) and v (B, T, h, c), both 0 where a key may not be attended."""
    h = k.shape[2]
    k, v = k.to(dtype)[..., None], v.to(dtype).unflatten(2, (h, -1))
    if mask is not None:
        k, v = torch.where(mask[..., None, None], k, DEAD), torch.where(mask[..., None, None], v, 0.0)
    return torch.exp(k - k.amax(1, keepdim=True).clamp_min(FLOOR)), v


def _ratio(Z: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator / denominator (B, T, h, c), 0 where nothing was summed, and the denominator, 1 there."""
    den = torch.where(Z[..., -1:] > 0, Z[..., -1:], 1.0)
    return Z[..., :-1] / den, den


def forward(q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, mask: Tensor | None, grid: tuple[int, ...], prefix: int) -> Tensor:
    """y (B, T, D): q (or None), v (B, T, D), k (B, T, h), kernel (h, s, s) log-weights, mask (B, T) or None."""
    pairs, dtype = _pairs(kernel, v.shape[2], grid, prefix)
    e, v_ = _terms(k, v, mask, dtype)
    y = _ratio(pairs.over(torch.cat([e * v_, e], -1)))[0].flatten(2)
    return (y if q is None else y * torch.sigmoid(q.to(dtype))).to(v.dtype).contiguous()


def backward(
    g: Tensor, q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, mask: Tensor | None, grid: tuple[int, ...], prefix: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq (empty without q), dk, dv, dkernel."""
    pairs, dtype = _pairs(kernel, v.shape[2], grid, prefix)
    e, v_ = _terms(k, v, mask, dtype)
    X = torch.cat([e * v_, e], -1)
    y, den = _ratio(pairs.over(X))
    gy, dq = g.to(dtype), q
    if q is not None:
        gate = torch.sigmoid(q.to(dtype))
        dq, gy = gy * y.flatten(2) * gate * (1 - gate), gy * gate
    gy = gy.unflatten(2, (k.shape[2], -1)) / den
    G = torch.cat([gy, -(gy * y).sum(-1, keepdim=True)], -1)
    dX = pairs.back(G)
    dv = (e * dX[..., :-1]).flatten(2)
    dk = (e * ((v_ * dX[..., :-1]).sum(-1, keepdim=True) + dX[..., -1:]))[..., 0]
    dw = pairs.taps(X, G) * pairs.weights * (kernel <= CAP)  # type: ignore[attr-defined]  # both have them
    empty = v.new_empty(0)
    return empty if dq is None else dq.to(v.dtype).contiguous(), dk.to(v.dtype).contiguous(), dv.to(v.dtype).contiguous(), dw.to(kernel.dtype).contiguous()
