"""Run RMS norm on the C library, on tensors and without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from . import DTYPES, empty_result, function, pointers

_forward = function("rms_forward", "ipppplldi")
_backward = function("rms_backward", "ipppppplli")


def saved_shapes(x: Tensor, weight: Tensor | None, *, eps: float) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass: 1 / rms of each row."""
    return [tuple(x.shape[:-1])]


def forward(x: Tensor, weight: Tensor | None, *, eps: float, save: bool) -> tuple[Tensor, Tensor]:
    """Return y in the shape of x, and 1 / rms of each row (empty unless ``save``)."""
    x, weight = x.contiguous(), None if weight is None else weight.contiguous()
    y = empty_result(x.shape, x.dtype)
    inverse = empty_result(x.shape[:-1]) if save else torch.empty(0, dtype=torch.float32, device="cpu")
    _forward(
        DTYPES[x.dtype],
        *pointers(x, weight, y, inverse if save else None),
        y.numel() // max(x.shape[-1], 1),
        x.shape[-1],
        eps,
        torch.get_num_threads(),
    )
    return y, inverse


def backward(g: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Return dx and dweight (empty without a weight)."""
    g, x, weight = g.contiguous(), x.contiguous(), None if weight is None else weight.contiguous()
    dx, dw = empty_result(x.shape, x.dtype), empty_result((0,) if weight is None else weight.shape, x.dtype)
    arrays = pointers(g, x, weight, inverse, dx, dw)
    _backward(DTYPES[x.dtype], *arrays, _rows(x), x.shape[-1], torch.get_num_threads())
    return dx, dw


def _rows(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)
