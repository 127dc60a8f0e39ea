"""What a program of torch.jit.trace still checks when it runs.

A trace keeps neither the checks of its inputs nor choices by their length: it repeats the operations of one call. So it
gets a check of its own, a scripted function inside the program, which raises where the numbers would be wrong.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

_tracing = torch._C._get_tracing_state


def traced() -> bool:
    """Return whether torch.jit.trace records the call; the exporter of ONNX, which uses it, checks sizes itself."""
    return _tracing() is not None and not torch.onnx.is_in_onnx_export()


def hold_length(x: Tensor, who: str, *, limit: int | None, fixed: bool, name: str = "max_len") -> Tensor:
    """Return x (B, T, D) such that the traced program refuses lengths above ``limit``, or all but this one if fixed."""
    if fixed:
        tokens = int(x.shape[1])
        says = f"{who}: this program was traced at {tokens} tokens and its steps depend on their number; trace it "
        return _scripted()(x, tokens, tokens, f"{says}at each length, or use torch.export; got")
    if limit is None:
        return x
    return _scripted()(x, 0, limit, f"{who}: was built with {name}={limit}; shorten the sequence or call resize; got")


def _held(x: Tensor, low: int, high: int, says: str) -> Tensor:
    tokens = x.size(1)
    if tokens < low or tokens > high:
        raise ValueError(says + " " + str(tokens) + ".")
    return x


@cache
def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(_held)
