"""New tokens of a stream on the C kernels whose state is sums (m, num, den), with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .operator import own_node

Past = tuple[Tensor, Tensor, Tensor]


def extended(
    kernel: Any,
    eager: Callable[..., tuple[Tensor, Past]],
    inputs: Sequence[Tensor | None],
    mask: Tensor | None,
    past: Past,
    **options: Any,
) -> tuple[Tensor, Past]:
    """Return the outputs over new tokens and the sums after them.

    Args:
        kernel: a module of ``kernels.cpu`` with ``extend`` and ``extend_backward``.
        eager: the same of ``inputs`` and the past in plain torch, for second derivatives.
        inputs: queries or None, keys, values and what else the kernel takes before the mask.
        past: m, num, den (B, D) in float64: the sums so far, in units of exp(m). m is data, without a gradient.
        options: of the kernel.
    """
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in (*inputs, *past)):
        y, m, num, den = _Extended.apply(kernel, eager, options, mask, *past, *inputs)  # type: ignore[no-untyped-call]
        return y, (m, num, den)
    y, after, _ = kernel.extend(*inputs, mask, past, **options)
    return y, after


class _Extended(torch.autograd.Function):
    """The kernel and its backward pass, or the eager form's where that is itself differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Any,
        eager: Callable[..., Any],
        options: dict[str, Any],
        mask: Tensor | None,
        m: Tensor,
        num: Tensor,
        den: Tensor,
        *inputs: Tensor | None,
    ) -> Any:
        y, after, saved = kernel.extend(*inputs, mask, (m, num, den), **options, save=True)
        ctx.save_for_backward(mask, m, num, den, after[0], saved, *inputs)
        ctx.kernel, ctx.eager, ctx.options = kernel, eager, options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(after[0])
        return y, *after

    @staticmethod
    def backward(ctx: Any, gy: Tensor | None, _: None, *of_after: Tensor | None) -> Any:  # type: ignore[override]  # one for each output
        mask, m, num, den, unit, saved, *inputs = ctx.saved_tensors
        g_num, g_den = (torch.zeros_like(num) if g is None else g for g in of_after)
        if gy is None:  # only the sums are asked for; one row of zeros stands for all
            gy = torch.zeros_like(inputs[1][:, :1]).expand_as(inputs[1])
        if torch.is_grad_enabled():
            of_inputs, of_sums = _again(ctx.eager, inputs, (m, num, den), unit, [gy, g_num, g_den])
        else:
            *found, d_num, d_den = ctx.kernel.extend_backward(gy, g_num, g_den, *inputs, mask, saved, **ctx.options)
            of_inputs = [None if a is None else g for a, g in zip(inputs, found, strict=True)]
            of_sums = [d_num, d_den]
        return None, None, None, None, None, *of_sums, *of_inputs


def _again(
    eager: Callable[..., Any], inputs: Sequence[Tensor | None], past: Past, unit: Tensor, gradients: list[Tensor]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of inputs, and of num and den, with their graph; ``unit`` is m of the kernel's sums."""
    own = [None if a is None else own_node(a) for a in (*inputs, *past[1:])]
    y, after = eager(*own[:-2], past=(past[0].detach(), *own[-2:]))
    scale = torch.exp((after[0] - unit).detach().clamp(-700.0, 700.0))
    wanted = [a for a in own if a is not None]
    results = [y, after[1] * scale, after[2] * scale]
    given = iter(torch.autograd.grad(results, wanted, gradients, create_graph=True, allow_unused=True))
    found = [None if a is None else next(given) for a in own]
    return found[:-2], found[-2:]
