"""Which values an option may have, and which class a spec names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import is_exporting, is_intercepted
from ..kernels.recording import recorder
from ..types import Options

T = TypeVar("T", bound=type)
LARGEST = 2**53  # up to which float64 holds every integer
FEW = 16  # for at most this many numbers, comparing in Python is faster than in torch


def choose_class(
    spec: object, kinds: Mapping[str, T], sizes: tuple[str, ...], *, who: str, option: str, others: str = ""
) -> tuple[T, Options]:
    """Return the class that a spec such as {"name": "fire", "hidden": 16} names, and the options that it gives.

    Args:
        kinds: the classes by name.
        sizes: parameters of the classes that are no options.
        who: who asks, in errors.
        option: name of the option that holds the spec, in errors.
        others: what else works, in errors, such as " or None".

    Raises:
        MixerError: for an unknown name or option.
    """
    options = dict(spec) if isinstance(spec, dict) else {}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in kinds:
        names = ", ".join(kinds)
        raise MixerError(f'{who}: {option} must be {{"name": one of {names}, ...}}{others}, got {spec!r}.')
    known = [parameter for parameter in inspect.signature(kinds[name]).parameters if parameter not in sizes]
    if not set(options) <= set(known):
        raise MixerError(f"{who}: {option}={spec!r}: the options of {name!r} are {', '.join(known)}.")
    return kinds[name], options


def is_whole(value: object, low: int) -> TypeGuard[int]:
    """Return whether a value is an integer of at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def check_init_std(who: str, value: object) -> None:
    """Raise an error, in the name of ``who``, unless this is a standard deviation."""
    if not number(value) or value < 0:
        raise MixerError(f"{who}: init_std must be a number >= 0, got {value!r}.")


def check_integers(who: str, *positions: object) -> None:
    """Raise an error, in the name of ``who``, unless positions are a tensor of integers."""
    for at in positions:
        if not isinstance(at, Tensor) or at.is_floating_point() or at.is_complex() or at.dtype == torch.bool:
            got = f"{at.dtype} {tuple(at.shape)}" if isinstance(at, Tensor) else repr(at)
            raise MixerError(f"{who}: expects integer positions, got {got}.")


def check_exact(who: str, *positions: Tensor) -> None:
    """Refuse positions of more than 2^53, which float64 rounds; ``who`` is named in the error.

    See ``may_read`` for where values are read.
    """
    for at in positions:
        if at.dtype is torch.int64 and may_read(at):
            low, high = extremes(at)
            if low < -LARGEST or high > LARGEST:
                raise MixerError(f"{who}: takes positions from -2^53 to 2^53, got positions from {low} to {high}.")


def may_read(at: Tensor) -> bool:
    """Return whether positions hold numbers to look at: on the CPU, outside of compilation, export and traces.

    A decoder, which records the step of one token, counts its tokens itself.
    """
    unseen = is_intercepted() or is_exporting() or recorder() is not None
    return at.is_cpu and at.numel() > 0 and not unseen


def extremes(at: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest of some integers."""
    if at.numel() <= FEW:  # one decoded token
        values = at.flatten().tolist()
        return min(values), max(values)
    low, high = at.aminmax()
    return int(low), int(high)


def number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
