"""Kernels as torch operators: so that autograd, torch.compile and the dispatcher know them.

A kernel is two operators, forward and backward. The backward operator's own derivative, which second derivatives need, is that of the eager form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..kernels import triton

_LIBRARY = torch.library.Library("tokenmix", "DEF")  # noqa: TOR901  (ours, defined once)
OPERATORS: dict[str, tuple[str, ...]] = {}
"""Name of an operator -> the kernels it has, of "cpu" and "triton"."""


def define(name: str, signature: str, *, cpu: Callable[..., Any] | None, cuda: Callable[..., Any] | None = None, fake: Callable[..., Any]) -> Any:
    """Register ``tokenmix::name`` with a signature in torch's schema language, its implementations and its shape function; returns the operator."""
    _LIBRARY.define(f"{name}{signature}")
    for key, run in (("CPU", cpu), ("CUDA", cuda)):
        if run is not None:
            _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"tokenmix::{name}", fake, lib=_LIBRARY)
    OPERATORS[name] = tuple(kind for kind, run in (("cpu", cpu), ("triton", cuda)) if run is not None)
    return getattr(torch.ops.tokenmix, name).default


def kernels(name: str, like: Tensor) -> Any:
    """The module of kernels called ``name`` for tensors like this one. The Triton ones are imported where they are used, as triton is optional."""
    where = "triton" if like.is_cuda or (triton.INTERPRETED and triton.available()) else "cpu"
    return import_module(f"..kernels.{where}.{name}", __package__)


def differentiable(name: str, *, keep: Callable[..., None], derive: Callable[..., Any]) -> None:
    """Register the derivative of ``tokenmix::name``: ``keep(ctx, inputs, output)`` and ``derive(ctx, *grads)``."""
    torch.library.register_autograd(f"tokenmix::{name}", derive, setup_context=keep, lib=_LIBRARY)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether the forward operator must keep what its backward needs."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def derive_twice(
    eager: Callable[..., Tensor], inputs: Sequence[Tensor | None], g: Tensor, weights: Sequence[Tensor | None]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The derivative of sum(weights_i * d_i) with regard to g and the inputs, where d_i are the gradients of ``eager(*inputs)`` weighted by g."""
    with torch.enable_grad():
        leaves = [None if x is None else _own(x) for x in inputs]
        g = _own(g)
        present = [x for x in leaves if x is not None]
        first = iter(torch.autograd.grad(eager(*leaves), present, g, create_graph=True, allow_unused=True))
        pairs = [(next(first), w) for x, w in zip(leaves, weights, strict=True) if x is not None]
        terms = [(d * w).sum() for d, w in pairs if d is not None and w is not None and d.requires_grad]
        if not terms:
            return None, [None] * len(inputs)
        found = iter(torch.autograd.grad(sum(terms), [g, *present], create_graph=torch.is_grad_enabled(), allow_unused=True))  # type: ignore[arg-type]  # a tensor
        return next(found), [None if x is None else next(found) for x in leaves]


def _own(x: Tensor) -> Tensor:
    """x as a node of its own, so that a derivative with regard to it counts no path by which others, g above all, depend on x."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
