"""AFT-simple as an operator: ``tokenmix::aft_simple`` and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.cpu import aft_simple as scan
from ._ops import define, derive_twice, differentiable, kernels, needs_grad


def aft_simple_kernel(q: Tensor | None, k: Tensor, v: Tensor, key_mask: Tensor | None, T: int, causal: bool) -> Tensor:
    """sigmoid(q) times the sums, or the sums alone without q: (B, T, D)."""
    return _forward(q, k, v, key_mask, T, causal, needs_grad(q, k, v))[0]


def _eager(q: Tensor | None, k: Tensor, v: Tensor, key_mask: Tensor | None, T: int, causal: bool) -> Tensor:
    from .aft import aft_simple

    like = k.new_zeros(()).expand(k.shape[0], T, k.shape[2]) if q is None else q
    return aft_simple(like, k, v, causal=causal, key_mask=key_mask, gate=None if q is None else "sigmoid", backend="eager")


def _run(q, k, v, key_mask, T, causal, save):
    return kernels("aft_simple", k).forward(q, k, v, key_mask, T, causal=causal, save=save)


def _fake(q, k, v, key_mask, T, causal, save):
    return k.new_empty(k.shape[0], T, k.shape[2]), k.new_empty(scan.saved_shape(k, causal) if save else (0,), dtype=torch.float32)


def _run_backward(g, q, k, v, key_mask, saved, causal):
    return kernels("aft_simple", k).backward(g, q, k, v, key_mask, saved, causal=causal)


def _fake_backward(g, q, k, v, key_mask, saved, causal):
    return k.new_empty((0,) if q is None else q.shape), k.new_empty(k.shape), k.new_empty(k.shape)


def _keep(ctx, inputs, output):
    q, k, v, key_mask, ctx.T, ctx.causal, _ = inputs
    ctx.save_for_backward(q, k, v, key_mask, output[1])


def _derive(ctx, g, _):
    q, k, v, key_mask, saved = ctx.saved_tensors
    dq, dk, dv = _backward(g, q, k, v, key_mask, saved, ctx.causal)
    return None if q is None else dq, dk, dv, None, None, None, None


def _keep_twice(ctx, inputs, output):
    g, q, k, v, key_mask, _, ctx.causal = inputs
    ctx.save_for_backward(g, q, k, v, key_mask)


def _derive_backward(ctx, *weights):
    g, q, k, v, key_mask = ctx.saved_tensors
    dg, (dq, dk, dv) = derive_twice(lambda *qkv: _eager(*qkv, key_mask, g.shape[1], ctx.causal), (q, k, v), g, weights)
    return dg, dq, dk, dv, None, None, None


_forward = define(
    "aft_simple", "(Tensor? q, Tensor k, Tensor v, Tensor? key_mask, SymInt T, bool causal, bool save) -> (Tensor, Tensor)", cpu=_run, cuda=_run, fake=_fake
)
_backward = define(
    "aft_simple_backward",
    "(Tensor g, Tensor? q, Tensor k, Tensor v, Tensor? key_mask, Tensor saved, bool causal) -> (Tensor, Tensor, Tensor)",
    cpu=_run_backward,
    cuda=_run_backward,
    fake=_fake_backward,
)
differentiable("aft_simple", keep=_keep, derive=_derive)
differentiable("aft_simple_backward", keep=_keep_twice, derive=_derive_backward)
