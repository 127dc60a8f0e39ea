"""Run the double normalisation of External attention on the C library, on tensors and without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from . import empty_result, function, pointers

BLOCK = 64  # EXTERNAL_T of external.c
NORMS = {"double": 0, "tokens": 1}

_forward = function("external_forward", "if" + "p" * 5 + "l" * 4 + "i")
_backward = function("external_backward", "i" + "p" * 7 + "l" * 4 + "i")


def saved_shapes(logits: Tensor, mask: Tensor | None, *, norm: str, eps: float) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides input and output.

    For each slot this is the largest logit, and the logarithm of its sum.
    """
    B, _, H, S = logits.shape
    return [(B, 2, H, S)]


def _part(logits: Tensor, numbers: int) -> Tensor:
    B, T, H, S = logits.shape
    return empty_result((B, -(-T // BLOCK), numbers, H, S))


def forward(logits: Tensor, mask: Tensor | None, *, norm: str, eps: float, save: bool) -> tuple[Tensor, Tensor]:
    """Return the weights (B, T, H, S) of float32 logits, 0 where masked, and the tensor saved for the backward pass."""
    logits, mask = logits.contiguous(), None if mask is None else mask.contiguous()
    w, level, part = (
        empty_result(logits.shape),
        empty_result(saved_shapes(logits, mask, norm=norm, eps=eps)[0]),
        _part(logits, 2),
    )
    arrays = pointers(logits, mask, w, level, part)
    _forward(NORMS[norm], eps, *arrays, *logits.shape, torch.get_num_threads())
    return w, level if save else level.new_empty(0)


def backward(
    g: Tensor, logits: Tensor, mask: Tensor | None, w: Tensor, level: Tensor, *, norm: str, eps: float
) -> tuple[Tensor]:
    """Return the gradient of the logits. The eps is in the level already."""
    g, logits, w, mask = (
        g.contiguous(),
        logits.contiguous(),
        w.contiguous(),
        None if mask is None else mask.contiguous(),
    )
    d, part = empty_result(logits.shape), _part(logits, 1)
    arrays = pointers(g, logits, mask, w, level, part, d)
    _backward(NORMS[norm], *arrays, *logits.shape, torch.get_num_threads())
    return (d,)
