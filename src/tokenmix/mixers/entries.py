"""The inputs of a mixer, its entries besides ``forward``, and whether module hooks or wrappers wait for its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

Result = TypeVar("Result")
_compiling, _tracing = torch.compiler.is_compiling, torch._C._get_tracing_state


class Inputs(NamedTuple):
    """The inputs of ``Mixer.forward``, checked: x (B, T, D), its context (B, S, D) or None, and the rest as it says."""

    x: Tensor
    context: Tensor | None = None
    positions: Tensor | None = None
    key_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    grid: tuple[int, ...] | None = None
    prefix: int = 0

    @property
    def keys(self) -> Tensor:
        """Return the tokens that keys and values come from: the context, or x itself."""
        return self.x if self.context is None else self.context


class Entry(NamedTuple, Generic[Result]):
    """One way into a mixer: a method run(x, past, positions, key_mask), and the past that it starts from.

    The past is a field of its own, because wrappers that offload weights move the tensors of a call's arguments.
    """

    run: Callable[[Tensor, Any, Tensor | None, Tensor | None], Result]
    past: Any


def called_with_hooks(module: nn.Module) -> bool:
    """Return whether calling a module does more than its own ``forward``: hooks, a replaced ``forward``, a compiler."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or _compiling()
        or _tracing() is not None
    )
