"""New tokens of a stream on the C kernels whose state is sums in units of exp(m), with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..types import Options
from .operator import own_node

LONG = 64  # new tokens from which sums in float32 over blocks drift no more than over a whole sequence


def has_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd records operations on these tensors."""
    if torch.is_grad_enabled():
        for a in tensors:  # a loop rather than any(): this runs for every token
            if a is not None and a.requires_grad:
                return True
    return False


def extend_on_kernel(
    kernel: ModuleType,
    eager: Callable[..., tuple[Tensor, Any]],
    inputs: Sequence[Tensor | None],
    mask: Tensor | None,
    past: Sequence[Tensor],
    **options: object,
) -> tuple[Tensor, Any]:
    """Return the outputs over new tokens and the sums after them.

    Args:
        kernel: a module of ``kernels.cpu`` with ``extend`` and ``extend_backward``. The former may return None, where
            the eager form computes what the kernel does not.
        eager: the same of ``inputs`` and the past in plain torch, for second derivatives.
        inputs: queries or None, keys, values and what else the kernel takes before the mask.
        past: m and the sums so far, in float64 and in units of exp(m): num and den (B, D), or acc (B, H, e + 1, e). m
            is data, without a gradient.
        options: of the kernel.
    """
    graph = has_gradient(*inputs, *past)
    done = kernel.extend(*inputs, mask, past, **options, save=graph)
    if done is None:
        return eager(*inputs, past=past)
    if graph:
        y, *after = _Extended.apply(done, kernel, eager, options, mask, len(past), *past, *inputs)  # type: ignore[no-untyped-call]
        return y, tuple(after)
    return done[0], done[1]


class _Extended(torch.autograd.Function):
    """The kernel's backward pass, or the eager form's where that is itself differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
        done: tuple[Tensor, Sequence[Tensor], Sequence[Tensor]],
        kernel: ModuleType,
        eager: Callable[..., tuple[Tensor, Sequence[Tensor]]],
        options: Options,
        mask: Tensor | None,
        states: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        y, after, kept = done
        ctx.save_for_backward(mask, after[0], *tensors, *kept)
        ctx.kernel, ctx.eager, ctx.options, ctx.states, ctx.tensors = kernel, eager, options, states, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(after[0])
        return y, *after

    @staticmethod
    def backward(ctx: Any, gy: Tensor | None, _: None, *of_after: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # one for each output
        mask, unit, *rest = ctx.saved_tensors
        past, inputs, kept = rest[: ctx.states], rest[ctx.states : ctx.tensors], rest[ctx.tensors :]
        g_sums = [torch.zeros_like(a) if g is None else g for a, g in zip(past[1:], of_after, strict=True)]
        if gy is None:  # only the sums are asked for; one row of zeros stands for all
            gy = torch.zeros_like(inputs[1][:, :1]).expand_as(inputs[1])
        if torch.is_grad_enabled():
            of_inputs, of_sums = _derive_again(ctx.eager, inputs, past, unit, [gy, *g_sums])
        else:
            found = ctx.kernel.extend_backward(gy, g_sums, *inputs, mask, past, kept, **ctx.options)
            n = len(inputs)
            of_inputs = [None if a is None else g for a, g in zip(inputs, found[:n], strict=True)]
            of_sums = found[n:]
        return None, None, None, None, None, None, None, *of_sums, *of_inputs


def _derive_again(
    eager: Callable[..., tuple[Tensor, Sequence[Tensor]]],
    inputs: Sequence[Tensor | None],
    past: Sequence[Tensor],
    unit: Tensor,
    gradients: list[Tensor],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of inputs and sums with their graph; ``unit`` is m of the kernel's sums."""
    n = len(inputs)
    own = [None if a is None else own_node(a) for a in (*inputs, *past[1:])]
    y, after = eager(*own[:n], past=(past[0].detach(), *own[n:]))
    scale = torch.exp((after[0] - unit).detach().clamp(-700.0, 700.0))
    sums = [a * (scale if a.ndim == scale.ndim else scale[..., None, :]) for a in after[1:]]
    wanted = [a for a in own if a is not None]
    given = iter(torch.autograd.grad([y, *sums], wanted, gradients, create_graph=True, allow_unused=True))
    found = [None if a is None else next(given) for a in own]
    return found[:n], found[n:]
