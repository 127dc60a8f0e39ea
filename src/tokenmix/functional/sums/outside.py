"""How keys outside of a window weigh: the values of the option ``outside``."""

from __future__ import annotations

from typing import Literal, get_args

Outside = Literal["zero", "none"]
"""Of AFT-local and AFT-conv: "zero", with a bias of 0; "none", not at all."""

LocalOutside = Literal["none", "pool"]
"""Of local softmax attention: "none", not at all; "pool", with a logit of 0."""

OUTSIDES: tuple[Outside, ...] = get_args(Outside)
LOCAL_OUTSIDES: tuple[LocalOutside, ...] = get_args(LocalOutside)
