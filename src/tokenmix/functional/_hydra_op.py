"""Hydra attention as an operator: ``tokenmix::hydra`` and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.cpu import hydra as cpu
from ._aft_simple_op import aft_simple_kernel
from ._ops import define, derive_twice, differentiable, kernels, needs_grad

OWN = ("cosine", "identity", "mean")
"""The maps that the kernel knows; others are applied around it."""


def hydra_kernel(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, feature: str, normalise: bool, eps: float, causal: bool) -> Tensor:
    """The whole of ``functional.hydra``: (B, T, D) in q's dtype."""
    of_q, of_k = feature.split("/")[0], feature.split("/")[-1]
    if of_k == "softmax":
        return _softmax(q, k, v, key_mask, of_q, eps, causal)
    dtype, mean = q.dtype, normalise or of_k == "mean"
    if of_q not in OWN or of_k not in OWN:
        q, k, v = (a.to(torch.promote_types(a.dtype, torch.float32)) for a in (q, k, v))  # features are not rounded to half precision
    if of_q not in OWN:
        q = _map(of_q, q, eps)
    if of_k not in OWN:
        k = _map(of_k, k if key_mask is None else torch.where(key_mask[..., None], k, 0.0), eps)
    maps = of_q == "cosine", of_k == "cosine", float(eps)
    return _forward(q, k, v, key_mask, causal, *maps, mean, needs_grad(q, k, v))[0].to(dtype)


def _map(name: str, x: Tensor, eps: float) -> Tensor:
    from .sums.kernel_attention import MAPS

    return MAPS[name](x, eps)


def _softmax(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, of_q: str, eps: float, causal: bool) -> Tensor:
    """Keys weighed by their softmax over time are AFT-simple."""
    if of_q == "sigmoid":
        return aft_simple_kernel(q, k, v, key_mask, q.shape[1], causal)
    y = aft_simple_kernel(None, k, v, key_mask, q.shape[1], causal)
    wide = torch.promote_types(q.dtype, torch.float32)
    return (_map(of_q, q.to(wide), eps) * y.to(wide)).to(q.dtype)


def _eager(q, k, v, key_mask, causal, of_q, of_k, eps, mean):
    from .hydra import hydra

    names = ("identity", "cosine")
    feature = f"{names[of_q]}/{names[of_k]}"
    return hydra(q, k, v, feature=feature, normalise=mean, eps=eps, causal=causal, key_mask=key_mask, backend="eager")


def _run(q, k, v, key_mask, causal, of_q, of_k, eps, mean, save):
    y, saved = kernels("hydra", k).forward(q, k, v, key_mask, (of_q, of_k, eps), causal=causal, mean=mean)
    return y, saved if save else saved.new_empty(0)


def _fake(q, k, v, key_mask, causal, of_q, of_k, eps, mean, save):
    return q.new_empty(q.shape), q.new_empty(cpu.saved_shape(k, causal) if save else (0,), dtype=torch.float32)


def _run_backward(g, q, k, v, key_mask, saved, causal, of_q, of_k, eps, mean):
    return kernels("hydra", k).backward(g, q, k, v, key_mask, saved, (of_q, of_k, eps), causal=causal, mean=mean)


def _fake_backward(g, q, k, v, key_mask, saved, causal, of_q, of_k, eps, mean):
    return q.new_empty(q.shape), k.new_empty(k.shape), k.new_empty(k.shape)


def _keep(ctx, inputs, output):
    q, k, v, key_mask, *ctx.options, _ = inputs
    ctx.save_for_backward(q, k, v, key_mask, output[1])


def _derive(ctx, g, _):
    q, k, v, key_mask, saved = ctx.saved_tensors
    return *_backward(g, q, k, v, key_mask, saved, *ctx.options), *[None] * 7


def _keep_twice(ctx, inputs, output):
    g, q, k, v, key_mask, _, *ctx.options = inputs
    ctx.save_for_backward(g, q, k, v, key_mask)


def _derive_backward(ctx, *weights):
    g, q, k, v, key_mask = ctx.saved_tensors
    dg, (dq, dk, dv) = derive_twice(lambda *qkv: _eager(*qkv, key_mask, *ctx.options), (q, k, v), g, weights)
    return dg, dq, dk, dv, *[None] * 7


_OPTIONS = "bool causal, bool of_q, bool of_k, float eps, bool mean"
_forward = define("hydra", f"(Tensor q, Tensor k, Tensor v, Tensor? key_mask, {_OPTIONS}, bool save) -> (Tensor, Tensor)", cpu=_run, cuda=_run, fake=_fake)
_backward = define(
    "hydra_backward",
    f"(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor saved, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    cpu=_run_backward,
    cuda=_run_backward,
    fake=_fake_backward,
)
differentiable("hydra", keep=_keep, derive=_derive)
differentiable("hydra_backward", keep=_keep_twice, derive=_derive_backward)
