"""Run the gate of a SwiGLU on the C library, on tensors and without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from . import DTYPES, empty_result, function, pointers

_forward = function("gated_forward", "ippp" + "li")
_backward = function("gated_backward", "ippppp" + "li")


def saved_shapes(gate: Tensor, x: Tensor) -> list[tuple[int, ...]]:
    """Return no shape: the backward pass needs the inputs alone."""
    return []


def forward(gate: Tensor, x: Tensor, *, save: bool) -> Tensor:
    """Return silu(gate) * x."""
    gate, x = gate.contiguous(), x.contiguous()
    y = empty_result(x.shape, x.dtype)
    _forward(DTYPES[x.dtype], *pointers(gate, x, y), x.numel(), torch.get_num_threads())
    return y


def backward(g: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return dgate, dx."""
    g, gate, x = g.contiguous(), gate.contiguous(), x.contiguous()
    dgate, dx = empty_result(x.shape, x.dtype), empty_result(x.shape, x.dtype)
    _backward(DTYPES[x.dtype], *pointers(g, gate, x, dgate, dx), x.numel(), torch.get_num_threads())
    return dgate, dx
