"""Run rotary positions on the C library, on tensors and without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from . import DTYPES, empty_result, function, pointers

_rotate = function("rotate", "ippppiifllllli")


def saved_shapes(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> list[tuple[int, ...]]:
    """Return no shape: the backward pass turns back with the same angles."""
    return []


def forward(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, save: bool) -> Tensor:
    """Return x (B, T, H, e) with its pairs turned; cos and sin (B or 1, T, m) are float32."""
    return _rotate_pairs(x, cos, sin, interleaved, 1.0)


def backward(g: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> tuple[Tensor]:
    """Return dx, which is g turned back."""
    return (_rotate_pairs(g, cos, sin, interleaved, -1.0),)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    y, shared = empty_result(x.shape, x.dtype), cos.shape[0] == 1
    arrays = pointers(x, cos, sin, y)
    sizes = *x.shape, cos.shape[-1], torch.get_num_threads()
    _rotate(DTYPES[x.dtype], *arrays, int(interleaved), int(shared), sign, *sizes)
    return y
