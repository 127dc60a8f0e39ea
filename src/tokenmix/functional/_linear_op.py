"""Linear attention as an operator: ``tokenmix::linear_attention`` and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import define, derive_twice, differentiable, kernels, needs_grad


def linear_kernel(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, heads: int, feature: str, causal: bool) -> Tensor:
    """The whole of ``functional.linear_attention``: (B, T, H e) in q's dtype. "elu" and "exp" are the kernel's own, of others it takes the logarithms."""
    if feature not in ("elu", "exp"):
        from .linear import LOG_FEATURES

        wide = torch.promote_types(q.dtype, torch.float32)
        shown = k if key_mask is None else torch.where(key_mask[..., None], k, 0.0)
        a, b = (LOG_FEATURES[feature](x.to(wide).unflatten(-1, (heads, -1))).flatten(2) for x in (q, shown))
        return _forward(a, b, v.to(wide), key_mask, heads, False, causal, needs_grad(q, k, v))[0].to(q.dtype)
    return _forward(q, k, v, key_mask, heads, feature == "elu", causal, needs_grad(q, k, v))[0]


def _eager(q, k, v, key_mask, heads, elu, causal):
    from .linear import linear_attention

    return linear_attention(q, k, v, heads=heads, feature="elu" if elu else "exp", causal=causal, key_mask=key_mask, backend="eager")


def _run(q, k, v, key_mask, heads, elu, causal, save):
    y, saved = kernels("linear", q).forward(q, k, v, key_mask, heads=heads, elu=elu, causal=causal)
    return y, saved if save else saved.new_empty(0)


def _fake(q, k, v, key_mask, heads, elu, causal, save):
    return q.new_empty(q.shape), q.new_empty(kernels("linear", q).saved_shape(q, heads, causal) if save else (0,), dtype=torch.float32)


def _run_backward(g, q, k, v, key_mask, y, saved, heads, elu, causal):
    return kernels("linear", q).backward(g, q, k, v, key_mask, y, saved, heads=heads, elu=elu, causal=causal)


def _fake_backward(g, q, k, v, key_mask, y, saved, heads, elu, causal):
    return q.new_empty(q.shape), k.new_empty(k.shape), k.new_empty(k.shape)


def _keep(ctx, inputs, output):
    q, k, v, key_mask, *ctx.options, _ = inputs
    ctx.save_for_backward(q, k, v, key_mask, *output)


def _derive(ctx, g, _):
    q, k, v, key_mask, y, saved = ctx.saved_tensors
    return *_backward(g, q, k, v, key_mask, y.detach(), saved, *ctx.options), *[None] * 5


def _keep_twice(ctx, inputs, output):
    g, q, k, v, key_mask, _, _, *ctx.options = inputs
    ctx.save_for_backward(g, q, k, v, key_mask)


def _derive_backward(ctx, *weights):
    g, q, k, v, key_mask = ctx.saved_tensors
    dg, (dq, dk, dv) = derive_twice(lambda *qkv: _eager(*qkv, key_mask, *ctx.options), (q, k, v), g, weights)
    return dg, dq, dk, dv, *[None] * 6


_OPTIONS = "int heads, bool elu, bool causal"
_forward = define(
    "linear_attention", f"(Tensor q, Tensor k, Tensor v, Tensor? key_mask, {_OPTIONS}, bool save) -> (Tensor, Tensor)", cpu=_run, cuda=_run, fake=_fake
)
_backward = define(
    "linear_attention_backward",
    f"(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor y, Tensor saved, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    cpu=_run_backward,
    cuda=_run_backward,
    fake=_fake_backward,
)
differentiable("linear_attention", keep=_keep, derive=_derive)
differentiable("linear_attention_backward", keep=_keep_twice, derive=_derive_backward)
