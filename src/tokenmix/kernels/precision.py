"""The end of autocast: projections run in half precision, sums and scores in the precision the forms promise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ..system.tracing import keep_result

Given = ParamSpec("Given")
Found = TypeVar("Found")


@keep_result  # torch 2.9 and 2.10 cannot compile it
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def is_autocast_on(device: str) -> bool:
    """Return whether autocast is on for a kind of device; some devices, such as meta, have none."""
    return _has_autocast(device) and torch.is_autocast_enabled(device)


def cast_alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors to the widest of their dtypes.

    Under autocast a norm or a state is float32 beside projections in half precision.
    """
    wide = functools.reduce(torch.promote_types, (a.dtype for a in tensors))
    return tuple(a.to(wide) for a in tensors)


def sum_dtype(a: Tensor) -> torch.dtype:
    """Return the dtype in which sums over ``a`` are computed: its own, or float32 if that is wider."""
    return torch.promote_types(a.dtype, torch.float32)


def at_least_float32(a: Tensor) -> Tensor:
    """Cast ``a`` to float32 unless its dtype is wider."""
    return a.to(torch.promote_types(a.dtype, torch.float32))


def exact(form: Callable[Given, Found]) -> Callable[Given, Found]:
    """Decorate a form so that autocast is off inside it and no product of float32 tensors runs in half precision."""

    @functools.wraps(form)
    def run(*args: Given.args, **options: Given.kwargs) -> Found:
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return form(*args, **options)
        device = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
        if not is_autocast_on(device):
            return form(*args, **options)
        with torch.autocast(device, enabled=False):
            return form(*args, **options)

    return run
