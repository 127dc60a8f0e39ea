"""Which values an option may have."""

from __future__ import annotations

import math
from typing import Any

from ..errors import MixerError


def whole(value: Any, low: int) -> bool:
    """Return whether a value is an integer of at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def check_init_std(who: str, value: Any) -> None:
    """Refuse what is no standard deviation; ``who`` is named in the error."""
    if not number(value) or value < 0:
        raise MixerError(f"{who}: init_std must be a number >= 0, got {value!r}.")


def number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
