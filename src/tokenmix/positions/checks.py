"""Which values an option may have."""

from __future__ import annotations

import math
from typing import Any


def whole(value: Any, low: int) -> bool:
    """Return whether a value is an integer of at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
