"""How keys outside of a window weigh, and how filters do: the values of the options ``outside`` and ``filters``."""

from __future__ import annotations

from typing import Literal, get_args

Outside = Literal["zero", "none"]
"""Of AFT-local and AFT-conv: "zero", with a bias of 0; "none", not at all."""

LocalOutside = Literal["none", "pool"]
"""Of local softmax attention: "none", not at all; "pool", with a logit of 0."""

Filters = Literal["exp", "signed"]
"""Of AFT-conv: "exp", the factor of a tap w is exp(w); "signed", w is added to a factor of 1."""

OUTSIDES: tuple[Outside, ...] = get_args(Outside)
LOCAL_OUTSIDES: tuple[LocalOutside, ...] = get_args(LocalOutside)
FILTERS: tuple[Filters, ...] = get_args(Filters)
