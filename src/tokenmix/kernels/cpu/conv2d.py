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
NARROW = 32  # rows of the batch times channels of a head below which products of matrices are no gain
ROWS = 4  # of the grid whose pairs are summed by tap at once
BLOCK = 2**24  # elements of E held at once


class Pairs(Protocol):
    """E as a linear map of X, which lies as ``layout`` puts it: tokens on axis ``time``, a head's channels on axis ``channel``."""

    weights: Tensor
    time: int
    channel: int

    def layout(self, X: Tensor) -> Tensor:
        """(B, T, h, c) as this form wants it."""

    def tokens(self, X: Tensor) -> Tensor:
        """Back to (B, T, h c)."""

    def over(self, X: Tensor) -> Tensor:
        """E X."""

    def back(self, G: Tensor) -> Tensor:
        """E^T G."""

    def taps(self, X: Tensor, G: Tensor) -> Tensor:
        """sum G_t X_s over the pairs of each tap: (h, s, s)."""


class Matrix:
    """E row block by row block, laid out once for all rows of the batch. X lies as (h, T, B, c)."""

    time, channel = 1, 3

    def __init__(self, weights: Tensor, grid: tuple[int, ...], prefix: int):
        self.weights, self.size = weights, weights.shape[-1]
        self.table = F.pad(weights.flatten(1), (0, 1), value=1.0)
        cells = torch.cartesian_prod(*(torch.arange(n) for n in grid))
        self.cells = F.pad(cells, (0, 0, prefix, 0), value=-(1 << 30))  # a prefix token is far from all, and they from it

    def layout(self, X: Tensor) -> Tensor:
        return X.permute(2, 1, 0, 3).contiguous()

    def tokens(self, X: Tensor) -> Tensor:
        return X.permute(2, 1, 0, 3).flatten(2)

    def _rows(self) -> Iterator[tuple[slice, Tensor]]:
        T, s = len(self.cells), self.size
        step = max(1, BLOCK // (T * len(self.table)))
        for start in range(0, T, step):
            rows = slice(start, min(T, start + step))
            offset = self.cells[None] - self.cells[rows, None] + s // 2
            inside = ((offset >= 0) & (offset < s)).all(-1) & (self.cells[rows, None, 0] >= 0)
            yield rows, torch.where(inside, offset[..., 0] * s + offset[..., 1], s * s)

    def over(self, X: Tensor) -> Tensor:
        parts = [self.table[:, tap] @ X.flatten(2) for _, tap in self._rows()]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view_as(X)

    def back(self, G: Tensor) -> Tensor:
        return sum(self.table[:, tap].mT @ G[:, rows].flatten(2) for rows, tap in self._rows()).view_as(G)  # type: ignore[union-attr]  # never empty

    def taps(self, X: Tensor, G: Tensor) -> Tensor:
        total = torch.zeros_like(self.table)
        for rows, tap in self._rows():
            total.index_add_(1, tap.flatten(), (G[:, rows].flatten(2) @ X.flatten(2).mT).flatten(1))
        return total[:, :-1].view_as(self.weights)


class Filter:
    """E as a depthwise convolution and the sums of what lies outside of it: no T x T anything. X lies as (B, h, c, T)."""

    time, channel = 3, 2

    def __init__(self, weights: Tensor, grid: tuple[int, ...], prefix: int):
        self.weights, self.grid, self.prefix, self.half = weights, grid, prefix, weights.shape[-1] // 2

    def layout(self, X: Tensor) -> Tensor:
        return X.permute(0, 2, 3, 1).contiguous()

    def tokens(self, X: Tensor) -> Tensor:
        return X.permute(0, 3, 1, 2).flatten(2)

    def _maps(self, X: Tensor) -> Tensor:
        """The grid's tokens as (B, h c, H, W)."""
        return X[..., self.prefix :].flatten(1, 2).unflatten(2, self.grid)

    def _both(self, X: Tensor, weights: Tensor) -> Tensor:
        P, x = self.prefix, self._maps(X)
        each = weights.repeat_interleave(X.shape[2], 0)[:, None]
        y = F.conv2d(x, each, padding=self.half, groups=x.shape[1]).add_(beyond(x, self.half)).view_as(X[..., P:])
        if not P:
            return y
        return torch.cat([X.sum(3, keepdim=True).expand(-1, -1, -1, P), y + X[..., :P].sum(3, keepdim=True)], 3)

    def over(self, X: Tensor) -> Tensor:
        return self._both(X, self.weights)

    def back(self, G: Tensor) -> Tensor:
        return self._both(G, self.weights.flip(1, 2))

    def taps(self, X: Tensor, G: Tensor) -> Tensor:
        """A few rows of the grid at a time, with the rows they reach: products of matrices, whose entries are then summed by tap."""
        (H, W), r, s = self.grid, self.half, self.weights.shape[-1]
        if X.shape[0] * X.shape[2] < NARROW:
            return self._taps_of_narrow(X, G)
        x, g = (a[..., self.prefix :].permute(1, 3, 0, 2).flatten(2) for a in (X, G))  # (h, T, B c)
        total = self.weights.new_zeros(len(self.weights), s * s + 1)
        across = torch.arange(W) - torch.arange(W)[:, None] + r
        for top in range(0, H, ROWS):
            end, first, last = min(H, top + ROWS), max(0, top - r), min(H, top + ROWS + r)
            down = torch.arange(first, last) - torch.arange(top, end)[:, None] + r
            inside = ((down >= 0) & (down < s))[:, None, :, None] & ((across >= 0) & (across < s))[None, :, None]
            tap = torch.where(inside, down[:, None, :, None] * s + across[None, :, None], s * s)
            total.index_add_(1, tap.flatten(), (g[:, top * W : end * W] @ x[:, first * W : last * W].mT).flatten(1))
        return total[:, :-1].view_as(self.weights)

    def _taps_of_narrow(self, X: Tensor, G: Tensor) -> Tensor:
        """The same where the products would be too thin: the convolution's own derivative."""
        x, g, s = self._maps(X), self._maps(G), self.weights.shape[-1]
        like = self.weights.repeat_interleave(X.shape[2], 0)[:, None]
        derived = torch.ops.aten.convolution_backward(g, x, like, None, [1, 1], [s // 2] * 2, [1, 1], False, [0, 0], x.shape[1], [False, True, False])
        return derived[1].view(len(self.weights), -1, s, s).sum(1)


def beyond(x: Tensor, half: int) -> Tensor:
    """For each cell of (B, C, H, W) the sum of the cells more than ``half`` away along either axis, of positive pieces only."""
    far = [((torch.arange(n) - torch.arange(n)[:, None]).abs() > half).to(x.dtype) for n in x.shape[2:]]
    sides = F.avg_pool2d(x @ far[1], (2 * half + 1, 1), 1, (half, 0), divisor_override=1)
    return sides.add_((x.sum(3) @ far[0])[..., None])


def _pairs(kernel: Tensor, D: int, grid: tuple[int, ...], prefix: int) -> tuple[Pairs, torch.dtype]:
    """E in the cheapest exact form, and the dtype of the sums."""
    low, high = (float(a) for a in kernel.aminmax()) if kernel.numel() else (0.0, 0.0)
    if not max(high, 0.0) - min(low, 0.0) < SPAN:
        return Matrix(torch.exp(kernel.double().clamp_max(CAP)), grid, prefix), torch.float64
    tokens, weights = prefix + grid[0] * grid[1], torch.exp(kernel.float())
    return (Matrix if tokens <= FEW and 16 * len(kernel) <= D else Filter)(weights, grid, prefix), torch.float32


def _terms(pairs: Pairs, k: Tensor, v: Tensor, mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """e^(k - m) with one channel, and v, as the form lays them out; both 0 where a key may not be attended."""
    k, v = k.to(dtype)[..., None], v.to(dtype).unflatten(2, (k.shape[2], -1))
    if mask is not None:
        k, v = torch.where(mask[..., None, None], k, DEAD), torch.where(mask[..., None, None], v, 0.0)
    return pairs.layout(torch.exp(k - k.amax(1, keepdim=True).clamp_min(FLOOR))), pairs.layout(v)


def _mixed(pairs: Pairs, e: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator / denominator, 0 where nothing was summed, and 1 / denominator, 1 there."""
    den = pairs.over(e)
    inverse = 1.0 / torch.where(den > 0, den, 1.0)
    return pairs.over(e * v).mul_(inverse), inverse


def forward(q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, mask: Tensor | None, grid: tuple[int, ...], prefix: int) -> Tensor:
    """y (B, T, D): q (or None), v (B, T, D), k (B, T, h), kernel (h, s, s) log-weights, mask (B, T) or None."""
    pairs, dtype = _pairs(kernel, v.shape[2], grid, prefix)
    y = pairs.tokens(_mixed(pairs, *_terms(pairs, k, v, mask, dtype))[0])
    return (y if q is None else y * torch.sigmoid(q.to(dtype))).to(v.dtype).contiguous()


def backward(
    g: Tensor, q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, mask: Tensor | None, grid: tuple[int, ...], prefix: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq (empty without q), dk, dv, dkernel."""
    pairs, dtype = _pairs(kernel, v.shape[2], grid, prefix)
    e, v_ = _terms(pairs, k, v, mask, dtype)
    y, inverse = _mixed(pairs, e, v_)
    gy, dq = g.to(dtype), v.new_empty(0)
    if q is not None:
        gate = torch.sigmoid(q.to(dtype))
        dq, gy = (gy * pairs.tokens(y) * gate * (1 - gate)).to(v.dtype).contiguous(), gy * gate
    G = pairs.layout(gy.unflatten(2, (k.shape[2], -1))) * inverse
    G1 = -(G * y).sum(pairs.channel, keepdim=True)
    dX = pairs.back(G)
    dw = (pairs.taps(e * v_, G) + pairs.taps(e, G1)) * pairs.weights * (kernel <= CAP)
    dk = pairs.tokens(e * ((v_ * dX).sum(pairs.channel, keepdim=True) + pairs.back(G1)))
    dv = pairs.tokens(dX.mul_(e))
    return dq, dk.to(v.dtype).contiguous(), dv.to(v.dtype).contiguous(), dw.to(kernel.dtype).contiguous()
