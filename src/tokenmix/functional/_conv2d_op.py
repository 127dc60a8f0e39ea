"""AFT-conv on 2-D grids as an operator: ``tokenmix::aft_conv2d`` and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.cpu import aft_conv2d as conv2d
from ._ops import define, derive_twice, differentiable, needs_grad


def aft_conv2d_kernel(q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, key_mask: Tensor | None, grid: tuple[int, ...], prefix: int) -> Tensor:
    """sigmoid(q) times the mixed values, or these alone without q: (B, T, D)."""
    return _forward(q, k, v, kernel, key_mask, list(grid), prefix, needs_grad(q, k, v, kernel))[0]


def _eager(q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, key_mask: Tensor | None, grid: list[int], prefix: int) -> Tensor:
    from .aft_conv import aft_conv

    options: dict[str, Any] = {"grid": tuple(grid), "prefix": prefix, "key_mask": key_mask, "gate": None if q is None else "sigmoid", "backend": "eager"}
    return aft_conv(v if q is None else q, k, v, kernel, **options)


def _cpu(q, k, v, kernel, key_mask, grid, prefix, save):
    return conv2d.forward(q, k, v, kernel, key_mask, tuple(grid), prefix, save=save)


def _fake(q, k, v, kernel, key_mask, grid, prefix, save):
    return v.new_empty(v.shape), v.new_empty(conv2d.saved_shape(k) if save else (0,), dtype=torch.float32)


def _cpu_backward(g, q, k, v, kernel, key_mask, y, saved, grid, prefix):
    return conv2d.backward(g, q, k, v, kernel, key_mask, y, saved, tuple(grid), prefix)


def _fake_backward(g, q, k, v, kernel, key_mask, y, saved, grid, prefix):
    return v.new_empty((0,) if q is None else q.shape), k.new_empty(k.shape), v.new_empty(v.shape), kernel.new_empty(kernel.shape)


def _keep(ctx, inputs, output):
    q, k, v, kernel, key_mask, ctx.grid, ctx.prefix, _ = inputs
    ctx.save_for_backward(q, k, v, kernel, key_mask, *output)


def _derive(ctx, g, _):
    q, k, v, kernel, key_mask, y, saved = ctx.saved_tensors
    dq, dk, dv, dw = _backward(g, q, k, v, kernel, key_mask, y, saved, ctx.grid, ctx.prefix)
    return None if q is None else dq, dk, dv, dw, None, None, None, None


def _keep_twice(ctx, inputs, output):
    g, q, k, v, kernel, key_mask, _, _, ctx.grid, ctx.prefix = inputs
    ctx.save_for_backward(g, q, k, v, kernel, key_mask)


def _derive_backward(ctx, *weights):
    g, q, k, v, kernel, key_mask = ctx.saved_tensors
    dg, (dq, dk, dv, dw) = derive_twice(lambda *a: _eager(*a, key_mask, ctx.grid, ctx.prefix), (q, k, v, kernel), g, weights)
    return dg, dq, dk, dv, dw, None, None, None, None, None


_INPUTS = "Tensor? q, Tensor k, Tensor v, Tensor kernel, Tensor? key_mask"
_forward = define("aft_conv2d", f"({_INPUTS}, SymInt[] grid, SymInt prefix, bool save) -> (Tensor, Tensor)", cpu=_cpu, fake=_fake)
_backward = define(
    "aft_conv2d_backward",
    f"(Tensor g, {_INPUTS}, Tensor y, Tensor saved, SymInt[] grid, SymInt prefix) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu_backward,
    fake=_fake_backward,
)
differentiable("aft_conv2d", keep=_keep, derive=_derive)
differentiable("aft_conv2d_backward", keep=_keep_twice, derive=_derive_backward)
