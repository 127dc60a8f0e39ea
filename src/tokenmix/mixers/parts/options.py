"""Checks of constructor options; each raises MixerError in the name of the mixer, with the value that was given."""

from __future__ import annotations

from math import isfinite
from typing import Any

from ..base import Mixer


def at_least(mixer: Mixer, low: int, **options: Any) -> None:
    """Refuse options that are not integers of at least ``low``."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            mixer.refuse(f"{name} must be an integer >= {low}, got {value!r}")


def one_of(mixer: Mixer, names: tuple[Any, ...], **options: Any) -> None:
    """Refuse options that are not among ``names``."""
    for name, value in options.items():
        if not any(value is each or (type(value) is type(each) and value == each) for each in names):
            mixer.refuse(f"{name} must be one of {', '.join(repr(each) for each in names)}, got {value!r}")


def check_heads(mixer: Mixer, heads: Any, *, name: str = "heads") -> int:
    """Return the features per head; refuse a number of heads, the option ``name``, that does not divide dim."""
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or mixer.dim % heads:
        mixer.refuse(f"{name}={heads!r} must divide dim={mixer.dim}")
    return mixer.dim // heads


def check_numbers(mixer: Mixer, **options: Any) -> None:
    """Refuse options that are not finite numbers."""
    for name, value in options.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value):
            mixer.refuse(f"{name} must be a finite number, got {value!r}")


def check_spread(mixer: Mixer, *, init_std: float, learned: bool = True) -> None:
    """Refuse a standard deviation below 0.

    A deviation of 0 is refused too if not ``learned``: the product of two factors that start at 0 stays 0.
    """
    if init_std < 0 or (init_std == 0 and not learned):
        must = "be a number >= 0" if learned else "be a number > 0; two factors that start at 0 never learn"
        mixer.refuse(f"init_std must {must}, got {init_std!r}")


def check_positive(mixer: Mixer, **options: Any) -> None:
    """Refuse options that are not positive numbers."""
    for name, value in options.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value) or not value > 0:
            mixer.refuse(f"{name} must be a positive number, got {value!r}")
