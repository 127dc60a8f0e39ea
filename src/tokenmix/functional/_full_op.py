"""AFT-full as an operator: ``tokenmix::aft_full`` and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.cpu import aft_full as full
from ._ops import define, derive_twice, differentiable, kernels, needs_grad


def aft_full_kernel(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor | tuple[Tensor, Tensor], key_mask: Tensor | None, causal: bool) -> Tensor:
    """sigmoid(q) times the ratio of sums, or the ratio alone without q: (B, T, D). w as ``aft_full`` takes it."""
    first, second = w if isinstance(w, tuple) else (w, None)
    first = first if first.ndim == 3 else first[None]
    if second is not None:
        second = second if second.ndim == 3 else second[None]
        both = max(first.shape[0], second.shape[0])
        first, second = first.expand(both, -1, -1), second.expand(both, -1, -1)
    return _forward(q, k, v, first, second, key_mask, causal, needs_grad(q, k, v, first, second))[0]


def _eager(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, w2: Tensor | None, key_mask: Tensor | None, causal: bool) -> Tensor:
    from .aft import aft_full

    like = k.new_zeros(()).expand(k.shape[0], w.shape[1], k.shape[2]) if q is None else q
    gate = None if q is None else "sigmoid"
    return aft_full(like, k, v, w if w2 is None else (w, w2), causal=causal, key_mask=key_mask, gate=gate, backend="eager")


def _run(q, k, v, w, w2, key_mask, causal, save):
    return kernels("aft_full", k).forward(q, k, v, w, w2, key_mask, causal=causal, save=save)


def _fake(q, k, v, w, w2, key_mask, causal, save):
    T = w.shape[1]
    kept = [k.new_empty(full.saved_shape(k, T) if save else (0,), dtype=torch.float32) for _ in range(2)]
    return k.new_empty(k.shape[0], T, k.shape[2]), *kept


def _run_backward(g, q, k, v, w, w2, key_mask, y0, den, causal):
    return kernels("aft_full", k).backward(g, q, k, v, w, w2, key_mask, y0, den, causal=causal)


def _fake_backward(g, q, k, v, w, w2, key_mask, y0, den, causal):
    dq, dw2 = k.new_empty((0,) if q is None else q.shape), w.new_empty((0,) if w2 is None else w2.shape)
    return dq, k.new_empty(k.shape), k.new_empty(k.shape), w.new_empty(w.shape), dw2


def _keep(ctx, inputs, output):
    q, k, v, w, w2, key_mask, ctx.causal, _ = inputs
    ctx.save_for_backward(q, k, v, w, w2, key_mask, output[1], output[2])


def _derive(ctx, g, *_):
    q, k, v, w, w2, key_mask, y0, den = ctx.saved_tensors
    dq, dk, dv, dw, dw2 = _backward(g, q, k, v, w, w2, key_mask, y0, den, ctx.causal)
    return None if q is None else dq, dk, dv, dw, None if w2 is None else dw2, None, None, None


def _keep_twice(ctx, inputs, output):
    g, q, k, v, w, w2, key_mask, _, _, ctx.causal = inputs
    ctx.save_for_backward(g, q, k, v, w, w2, key_mask)


def _derive_backward(ctx, *weights):
    g, q, k, v, w, w2, key_mask = ctx.saved_tensors
    dg, (dq, dk, dv, dw, dw2) = derive_twice(lambda *args: _eager(*args, key_mask, ctx.causal), (q, k, v, w, w2), g, weights)
    return dg, dq, dk, dv, dw, dw2, None, None, None, None


_INPUTS = "Tensor? q, Tensor k, Tensor v, Tensor w, Tensor? w2, Tensor? key_mask"
_forward = define("aft_full", f"({_INPUTS}, bool causal, bool save) -> (Tensor, Tensor, Tensor)", cpu=_run, cuda=_run, fake=_fake)
_backward = define(
    "aft_full_backward",
    f"(Tensor g, {_INPUTS}, Tensor y0, Tensor den, bool causal) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_run_backward,
    cuda=_run_backward,
    fake=_fake_backward,
)
differentiable("aft_full", keep=_keep, derive=_derive)
differentiable("aft_full_backward", keep=_keep_twice, derive=_derive_backward)
