"""Run AFT-conv on 2-D grids, on tensors and without autograd.

The C library computes it, or torch in the rare case that log-weights span ``SPAN`` or more.

Every query sees every key, so one maximum per head and row of the batch is safe, and with E_ts = exp(w) the mixing is
linear in X = [e^k v | e^k]: y = (E X)_num / (E X)_den. float32 loses keys 87 below the maximum. They cannot matter
while log-weights span less than ``SPAN``; otherwise the same is computed densely in float64, as in the eager form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import DTYPES, dense, empty_result, function, pointers, rows
from .nonfinite import NAN, Alarm, alarm_address, find_nan_gradients, is_marked, mark, mark_gradients, remove_nonfinite

_forward = function("conv2d_forward", "ii" + "p" * 8 + "ip")
_backward = function("conv2d_backward", "ii" + "p" * 13 + "i")

# The same values as in functional/sums/softmax.py.
DEAD, FLOOR, CAP = -(2.0 - 2.0**-23) * 2.0**127, -(2.0 - 2.0**-22) * 2.0**127, 300.0
SPAN = 60.0
BLOCK = 2**24  # elements of E held at once


def saved_shapes(
    q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, mask: Tensor | None, *, grid: Sequence[int], prefix: int
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for backward besides inputs and output: 1 / denominator, (B, T, h)."""
    return [tuple(k.shape)]


def _spans_too_much(kernel: Tensor) -> bool:
    """Say whether log-weights span too much for float32."""
    low, high = (float(a) for a in kernel.aminmax())
    return not max(high, 0.0) - min(low, 0.0) < SPAN


def _numbers(
    q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, g: Tensor | None, grid: tuple[int, ...], prefix: int
) -> Tensor:
    """Return the numbers of ``conv2d_of``."""
    strides = [n for a in (q, k, v, g) for n in ((0, 0) if a is None else a.stride()[:2])]
    numbers = [v.shape[0], v.shape[2], k.shape[2], prefix, *grid, kernel.shape[-1], *strides]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def forward(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    mask: Tensor | None,
    *,
    grid: Sequence[int],
    prefix: int,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D), and the tensor saved for the backward pass (empty unless ``save``).

    Args:
        q: (B, T, D), gating by a sigmoid, or None for no gate; v: (B, T, D).
        k: (B, T, h).
        kernel: log-weights (h, s, s).
        mask: (B, T), True = may be attended.
        grid: (H, W) of the tokens after the first ``prefix``.
    """
    alarm, grid = Alarm(), tuple(grid)
    y, saved = _run(q, k, v, kernel, mask, grid, prefix, alarm, save=save)
    if alarm:
        kernel, bad = _remove_nan(kernel, mask, v.shape, grid, prefix)
        rest = remove_nonfinite(q, k, v, mask, v.shape[1], causal=False, weights=bad)
        y = _run(rest.q, rest.k, rest.v, kernel, mask, grid, prefix, None, save=False)[0].masked_fill_(rest.rows, NAN)
        mark(saved)
    return y, saved


def _run(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    mask: Tensor | None,
    grid: tuple[int, ...],
    prefix: int,
    alarm: Alarm | None,
    *,
    save: bool,
) -> tuple[Tensor, Tensor]:
    saved = empty_result(k.shape if save else (0,))
    if _spans_too_much(kernel):
        y = _forward_wide(q, k, v, kernel, mask, grid, prefix)
        if alarm is not None and not bool(y.isfinite().all()):
            alarm.ring()
        return y, saved.zero_()
    y, q, k, v = empty_result(v.shape, v.dtype), None if q is None else rows(q), rows(k), rows(v)
    w, mask, numbers = dense(kernel.float()), dense(mask), _numbers(q, k, v, kernel, None, grid, prefix)
    fixed = DTYPES[v.dtype], int(q is not None), *pointers(q, k, v, w, mask)
    _forward(*fixed, *pointers(y, saved if save else None, numbers), torch.get_num_threads(), alarm_address(alarm))
    return y, saved


def backward(
    g: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    mask: Tensor | None,
    y: Tensor,
    saved: Tensor,
    *,
    grid: Sequence[int],
    prefix: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq (empty without q), dk, dv, dkernel; y and ``saved`` are what ``forward`` gave."""
    grid = tuple(grid)
    if is_marked(saved):
        return _backward_without(g, q, k, v, kernel, mask, grid, prefix)
    if _spans_too_much(kernel):
        return _backward_wide(g, q, k, v, kernel, mask, grid, prefix)
    dk, dv, dw = empty_result(k.shape, v.dtype), empty_result(v.shape, v.dtype), empty_result(kernel.shape)
    dq = empty_result((0,) if q is None else q.shape, v.dtype)
    g, q, k, v, y = rows(g), None if q is None else rows(q), rows(k), rows(v), y.contiguous()
    w, mask, numbers = dense(kernel.float()), dense(mask), _numbers(q, k, v, kernel, g, grid, prefix)
    fixed = (
        DTYPES[v.dtype],
        int(q is not None),
        *pointers(q, k, v, w, mask, g, y, saved),
    )
    _backward(*fixed, *pointers(dq, dk, dv, dw, numbers), torch.get_num_threads())
    return dq, dk, dv, dw.to(kernel.dtype)


def _remove_nan(
    kernel: Tensor, mask: Tensor | None, shape: torch.Size, grid: tuple[int, ...], prefix: int
) -> tuple[Tensor, Tensor]:
    """Return log-weights without NaN, and the rows and features (B or 1, T, D) where a NaN meets a valid key."""
    bad, (_, T, D) = kernel.isnan(), shape
    live = torch.ones(1, T, dtype=torch.float32, device=kernel.device) if mask is None else mask.float()
    cells = live[:, prefix:].unflatten(1, grid)[:, None]
    met = F.conv2d(cells, bad.float()[:, None], padding=kernel.shape[-1] // 2).flatten(2) > 0.5  # (B, h, cells)
    rows = F.pad(met, (prefix, 0)).transpose(1, 2)
    return kernel.masked_fill(bad, 0.0), rows.repeat_interleave(D // kernel.shape[0], -1)


def _backward_without(
    g: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    mask: Tensor | None,
    grid: tuple[int, ...],
    prefix: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernel, bad = _remove_nan(kernel, mask, v.shape, grid, prefix)
    rest = remove_nonfinite(q, k, v, mask, v.shape[1], causal=False, weights=bad)
    hot = find_nan_gradients(g, rest.rows, mask, v.shape[1], causal=False)
    y, saved = _run(rest.q, rest.k, rest.v, kernel, mask, grid, prefix, None, save=True)
    *grads, dw = backward(hot.g, rest.q, rest.k, rest.v, kernel, mask, y, saved, grid=grid, prefix=prefix)
    dq, dk, dv = mark_gradients(grads, hot)
    heads = hot.rows.unflatten(-1, (kernel.shape[0], -1)).any(-1).flatten(0, 1).any(0)
    return dq, dk, dv, dw.masked_fill(heads[:, None, None], NAN)


class Matrix:
    """E as a linear map in float64, one block of rows after another, for all rows of the batch; X is (h, T, B, c)."""

    def __init__(self, kernel: Tensor, grid: tuple[int, ...], prefix: int):
        weights = torch.exp(kernel.double().clamp_max(CAP))
        self.weights, self.size = weights, weights.shape[-1]
        self.table = F.pad(weights.flatten(1), (0, 1), value=1.0)
        cells = torch.cartesian_prod(*(torch.arange(n, dtype=torch.int64, device=kernel.device) for n in grid))
        self.cells = F.pad(cells, (0, 0, prefix, 0), value=-(1 << 30))  # prefix tokens are far from all others

    def layout(self, X: Tensor) -> Tensor:
        """Bring (B, T, h, c) to the layout of X."""
        return X.permute(2, 1, 0, 3).contiguous()

    def tokens(self, X: Tensor) -> Tensor:
        """Bring X back to (B, T, h c)."""
        return X.permute(2, 1, 0, 3).flatten(2)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        T, s = len(self.cells), self.size
        step = max(1, BLOCK // (T * len(self.table)))
        for start in range(0, T, step):
            block = slice(start, min(T, start + step))
            offset = self.cells[None] - self.cells[block, None] + s // 2
            inside = ((offset >= 0) & (offset < s)).all(-1) & (self.cells[block, None, 0] >= 0)
            yield block, torch.where(inside, offset[..., 0] * s + offset[..., 1], s * s)

    def multiply(self, X: Tensor) -> Tensor:
        """Compute E X."""
        parts = [self.table[:, tap] @ X.flatten(2) for _, tap in self._blocks()]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view_as(X)

    def multiply_transposed(self, G: Tensor) -> Tensor:
        """Compute E^T G."""
        parts = (self.table[:, tap].mT @ G[:, block].flatten(2) for block, tap in self._blocks())
        return sum(parts).view_as(G)  # type: ignore[union-attr]  # never empty

    def taps(self, X: Tensor, G: Tensor) -> Tensor:
        """Sum G_t X_s over the pairs of each tap: (h, s, s)."""
        total = torch.zeros_like(self.table)
        for block, tap in self._blocks():
            total.index_add_(1, tap.flatten(), (G[:, block].flatten(2) @ X.flatten(2).mT).flatten(1))
        return total[:, :-1].view_as(self.weights)


def _terms(pairs: Matrix, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return e^(k - m) with one channel, and v, in the layout of X; both are 0 where a key is masked."""
    k, v = k.double()[..., None], v.double().unflatten(2, (k.shape[2], -1))
    if mask is not None:
        k, v = torch.where(mask[..., None, None], k, DEAD), torch.where(mask[..., None, None], v, 0.0)
    return pairs.layout(torch.exp(k - k.amax(1, keepdim=True).clamp_min(FLOOR))), pairs.layout(v)


def _divide_sums(pairs: Matrix, e: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return numerator / denominator, 0 where nothing was summed, and 1 / denominator, 1 there."""
    den = pairs.multiply(e)
    inverse = 1.0 / torch.where(den > 0, den, 1.0)
    return pairs.multiply(e * v).mul_(inverse), inverse


def _forward_wide(
    q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, mask: Tensor | None, grid: tuple[int, ...], prefix: int
) -> Tensor:
    pairs = Matrix(kernel, grid, prefix)
    y = pairs.tokens(_divide_sums(pairs, *_terms(pairs, k, v, mask))[0])
    return (y if q is None else y * torch.sigmoid(q.double())).to(v.dtype).contiguous()


def _backward_wide(
    g: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    mask: Tensor | None,
    grid: tuple[int, ...],
    prefix: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = Matrix(kernel, grid, prefix)
    e, v_ = _terms(pairs, k, v, mask)
    y, inverse = _divide_sums(pairs, e, v_)
    gy, dq = g.double(), v.new_empty(0)
    if q is not None:
        gate = torch.sigmoid(q.double())
        dq, gy = (gy * pairs.tokens(y) * gate * (1 - gate)).to(v.dtype).contiguous(), gy * gate
    G = pairs.layout(gy.unflatten(2, (k.shape[2], -1))) * inverse
    G1 = -(G * y).sum(3, keepdim=True)
    dX = pairs.multiply_transposed(G)
    dw = (pairs.taps(e * v_, G) + pairs.taps(e, G1)) * pairs.weights * (kernel <= CAP)
    dk = pairs.tokens(e * ((v_ * dX).sum(3, keepdim=True) + pairs.multiply_transposed(G1)))
    dv = pairs.tokens(dX.mul_(e))
    return dq, dk.to(v.dtype).contiguous(), dv.to(v.dtype).contiguous(), dw.to(kernel.dtype).contiguous()
