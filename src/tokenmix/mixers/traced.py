"""What a program of torch.jit.trace, or of torch.fx, still checks when it runs.

A trace keeps neither the checks of its inputs nor choices by their length: it repeats the operations of one call. So it
gets a check of its own, a scripted function inside the program, which raises where the numbers would be wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

_tracing = torch._C._get_tracing_state


def is_traced() -> bool:
    """Return whether torch.jit.trace records the call; the exporter of ONNX, which uses it, checks sizes itself."""
    return _tracing() is not None and not torch.onnx.is_in_onnx_export()


def is_symbolic(x: object) -> bool:
    """Return whether torch.fx records the operations on x, whose sizes and numbers it does not know."""
    return isinstance(x, Proxy)


def hold_length(x: Tensor, who: str, *, limit: int | None, fixed: bool, name: str = "max_len") -> Tensor:
    """Return x (B, T, D) such that the traced program refuses lengths above ``limit``, or all but this one if fixed."""
    if fixed:
        tokens = int(x.shape[1])
        says = f"{who}: this program was traced at {tokens} tokens and its steps depend on their number; trace it "
        return _script_check(_check_range)(x, tokens, tokens, f"{says}at each length, or use torch.export; got")
    if limit is None:
        return x
    return _script_check(_check_range)(
        x, 0, limit, f"{who}: was built with {name}={limit}; shorten the sequence or call resize; got"
    )


def hold_grid(x: Tensor, grid: tuple[Any, ...], who: str) -> tuple[Tensor, tuple[int, ...]]:
    """Return x such that the traced program refuses grids of other sizes, and the grid in integers.

    The sizes of a traced tensor, such as those of patches, are tensors themselves.
    """
    sizes = tuple(int(n) for n in grid)
    says = f"{who}: this program was traced on a grid of {' x '.join(map(str, sizes))}; trace it at each size, or use "
    given = [n for n in grid if isinstance(n, Tensor)]
    if is_traced() and len(given) == len(sizes):
        x = _script_check(_held_grid)(x, given, list(sizes), f"{says}torch.export; got")
    return x, sizes


def hold_symbolic_grid(x: Any, sizes: Sequence[int], who: str) -> Any:
    """Return x (B, C, H, W), a proxy of torch.fx, such that its program refuses maps of other ``sizes``."""
    says = f"{who}: this program of torch.fx is for images of {' x '.join(map(str, sizes))}, padded; got"
    return x.tracer.create_proxy("call_function", _check_map, (x, list(sizes), says), {})


def _check_map(x: Tensor, sizes: list[int], says: str) -> Tensor:
    got = [x.size(2), x.size(3)]
    if got != sizes:
        raise ValueError(says + " " + str(got) + ".")
    return x


def _held_grid(x: Tensor, grid: list[Tensor], sizes: list[int], says: str) -> Tensor:
    got = [int(n) for n in grid]
    if got != sizes:
        raise ValueError(says + " " + str(got) + ".")
    return x


def _check_range(x: Tensor, low: int, high: int, says: str) -> Tensor:
    tokens = x.size(1)
    if tokens < low or tokens > high:
        raise ValueError(says + " " + str(tokens) + ".")
    return x


@cache
def _script_check(check: Callable[..., Tensor]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(check)
