"""The normalisation of external attention as an operator: ``tokenmix::external_weights`` and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.cpu import external as cpu
from ._ops import define, derive_twice, differentiable


def external_weights(logits: Tensor, key_mask: Tensor | None, *, norm: str, eps: float) -> Tensor:
    """The weights (B, T, heads, S) of float32 logits under ``norm`` "double" or "tokens" over all tokens; 0 where a token is masked."""
    return _forward(logits, key_mask, norm, float(eps))[0]


def _eager(logits: Tensor, key_mask: Tensor | None, norm: str, eps: float) -> Tensor:
    from .external import over_all_tokens, weights

    w = weights(logits, over_all_tokens(logits, key_mask), norm=norm, eps=eps, live=key_mask)
    return w if key_mask is None else torch.where(key_mask[..., None, None], w, 0.0)


def _cpu(logits, key_mask, norm, eps):
    return cpu.forward(logits, key_mask, norm=norm, eps=eps)


def _fake(logits, key_mask, norm, eps):
    return logits.new_empty(logits.shape), logits.new_empty(cpu.saved_shape(logits))


def _cpu_backward(g, logits, key_mask, w, level, norm, eps):
    return cpu.backward(g, logits, key_mask, w, level, norm=norm)


def _fake_backward(g, logits, key_mask, w, level, norm, eps):
    return logits.new_empty(logits.shape)


def _keep(ctx, inputs, output):
    logits, key_mask, *ctx.options = inputs
    ctx.save_for_backward(logits, key_mask, *output)


def _derive(ctx, g, _):
    logits, key_mask, w, level = ctx.saved_tensors
    return _backward(g, logits, key_mask, w.detach(), level, *ctx.options), None, None, None


def _keep_twice(ctx, inputs, output):
    g, logits, key_mask, _, _, *ctx.options = inputs
    ctx.save_for_backward(g, logits, key_mask)


def _derive_backward(ctx, weight):
    g, logits, key_mask = ctx.saved_tensors
    dg, (d,) = derive_twice(lambda x: _eager(x, key_mask, *ctx.options), (logits,), g, (weight,))
    return dg, d, None, None, None, None, None


_forward = define("external_weights", "(Tensor logits, Tensor? key_mask, str norm, float eps) -> (Tensor, Tensor)", cpu=_cpu, fake=_fake)
_backward = define(
    "external_weights_backward",
    "(Tensor g, Tensor logits, Tensor? key_mask, Tensor w, Tensor level, str norm, float eps) -> Tensor",
    cpu=_cpu_backward,
    fake=_fake_backward,
)
differentiable("external_weights", keep=_keep, derive=_derive)
differentiable("external_weights_backward", keep=_keep_twice, derive=_derive_backward)
