"""Which values an option may have."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import MixerError


def whole(value: Any, low: int) -> bool:
    """Return whether a value is an integer of at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def check_init_std(who: str, value: Any) -> None:
    """Refuse what is no standard deviation; ``who`` is named in the error."""
    if not number(value) or value < 0:
        raise MixerError(f"{who}: init_std must be a number >= 0, got {value!r}.")


def check_integers(who: str, *positions: Any) -> None:
    """Refuse positions that are no tensors of integers; ``who`` is named in the error."""
    for at in positions:
        if not isinstance(at, Tensor) or at.is_floating_point() or at.is_complex() or at.dtype == torch.bool:
            got = f"{at.dtype} {tuple(at.shape)}" if isinstance(at, Tensor) else repr(at)
            raise MixerError(f"{who}: expects integer positions, got {got}.")


def number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
