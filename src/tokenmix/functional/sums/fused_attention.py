"""Softmax attention by torch's fused kernel, made twice differentiable on the CPU, and as plain matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.backend import is_exporting, is_intercepted
from ...kernels.precision import at_least_float32
from .softmax import FLOOR, MASKED_KEY, Sums

_FLASH = 1  # torch's number for its CPU kernel
_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_flash_backward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Weigh values by softmax(scale q . k): q (B, H, T, e), k and v (B, G, S, e), mask (B, 1, T, S) bool; (B, H, T, e).

    The mask may be log-weights instead, where no gradient is needed.

    Torch's kernel has no second derivatives. On the CPU, a backward pass whose own graph is requested is that of
    ``plain_attention``.
    """
    grouped = bool(k.shape[1] != q.shape[1])
    if (
        _needs_twice(q, k, v)
        and torch._fused_sdp_choice(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped) == _FLASH
    ):
        return _Twice.apply(q, k, v, mask, causal, scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, w: Tensor | None = None
) -> Tensor:
    """Weigh values by the equation as matrix products in float32 or better; arguments as in ``fused_attention``.

    Args:
        w: log-weights added to the logits, broadcastable to (B, H, T, S).
    """
    logits, v = _logits(q, k, v, scale, w)
    if mask is not None and is_exporting():  # a sum takes half the time of a choice in ONNX Runtime
        logits = logits + torch.where(mask, 0.0, float("-inf")).to(logits.dtype)
    elif mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return logits.softmax(-1) @ v


def attention_sums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, w: Tensor | None = None) -> Sums:
    """Return the sums of exp(logits) v and of exp(logits) over these keys, which merge with those over others.

    Arguments as in ``plain_attention``; a query that ``mask`` leaves nothing has empty sums.
    """
    logits, v = _logits(q, k, v, scale, w)
    logits = torch.where(mask, logits, MASKED_KEY)
    m = logits.detach().amax(-1, keepdim=True).clamp_min(FLOOR)
    e = torch.exp(logits - m)
    return Sums(m, torch.zeros_like(m), torch.cat([e @ v, e.sum(-1, keepdim=True)], -1)[..., None])


def _logits(q: Tensor, k: Tensor, v: Tensor, scale: float | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the logits (B, H, T, S) in float32 or better, and the values for each head in the same dtype."""
    group = q.shape[1] // k.shape[1]
    q = at_least_float32(q)
    k, v = (a.to(q.dtype).repeat_interleave(group, 1) for a in (k, v))
    logits = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-1, -2)
    return (logits if w is None else logits + w.to(logits.dtype)), v


def _needs_twice(*tensors: Tensor) -> bool:
    """Return whether a backward pass on the CPU may follow, outside anything that traces or transforms the call."""
    if (
        _flash is None
        or _flash_backward is None
        or not torch.is_grad_enabled()
        or not any(a.requires_grad for a in tensors)
    ):
        return False
    return tensors[0].is_cpu and torch._C._get_tracing_state() is None and not is_intercepted()


class _Twice(torch.autograd.Function):
    """Torch's kernel and its backward pass, or the plain form's backward when that is itself differentiated."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        added = (
            None
            if mask is None
            else torch.zeros((), dtype=q.dtype, device=q.device).expand(mask.shape).masked_fill(~mask, float("-inf"))
        )
        y, level = _flash(q, k, v, 0.0, causal, attn_mask=added, scale=scale)  # type: ignore[misc]  # not None
        ctx.save_for_backward(q, k, v, mask, added, y, level)
        ctx.causal, ctx.scale = causal, scale
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # one output, one gradient
        q, k, v, mask, added, y, level = ctx.saved_tensors
        if not torch.is_grad_enabled():
            grads = _flash_backward(g, q, k, v, y, level, 0.0, ctx.causal, attn_mask=added, scale=ctx.scale)  # type: ignore[misc]  # not None
            return *grads, None, None, None
        if ctx.causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        q, k, v = leaves = tuple(a.view_as(a) if a.requires_grad else a.detach().requires_grad_() for a in (q, k, v))
        found = torch.autograd.grad(plain_attention(q, k, v, mask, ctx.scale).to(g.dtype), leaves, g, create_graph=True)
        return *found, None, None, None
