"""The promise on options: wrong ones are refused in one line, and all that are accepted work."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from math import isfinite
from types import UnionType
from typing import Any

import torch

from ..errors import MixerError
from .report import fail
from .subject import Subject

LARGE = 2**40  # more tokens, heads or features than fit: refused before memory is allocated
VALUES: tuple[object, ...] = (
    None,
    True,
    0,
    1,
    -1,
    3,
    LARGE,
    10**30,
    2.0,
    1.5,
    0.0,
    -1.0,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
)
VALUES += ([], [0], [-1], [2, "x"], [1.5], [LARGE], (2, 1), {}, {"name": "x"}, {"name": []}, torch.tensor(2))
FORMS = {
    float: (int, float),
    list: (list, tuple),
    Sequence: (list, tuple),
}  # what is accepted for these kinds besides themselves


def refuses_wrong_options(s: Subject) -> None:
    """Each option of the constructor either works with a value or refuses it; values of another type are refused.

    Every option is given values of every kind. A refusal is one MixerError in one line that names the class and the
    option; it comes from the constructor or from the first call.
    """
    kinds = _annotations(s)
    for name in list(inspect.signature(s.cls.__init__).parameters)[1:]:
        for value in VALUES:
            if name in kinds or not (
                isinstance(value, int) and value >= LARGE
            ):  # without an annotation nothing caps it before memory is allocated
                _check_value(s, name, value, right=_right(value, kinds.get(name, Any)))


def _annotations(s: Subject) -> dict[str, object]:
    try:
        return typing.get_type_hints(s.cls.__init__)  # type: ignore[misc]  # of the class at hand
    except (NameError, TypeError):  # of a class from outside, with names that exist only for type checkers
        return {}


def _right(value: object, kind: object) -> bool:
    """Return whether an annotation allows a value."""
    if isinstance(value, float) and not isfinite(value):
        return kind is Any
    for each in _member_types(kind):
        plain = typing.get_origin(each) or each
        if plain is Any or not isinstance(plain, type):
            return True
        if isinstance(value, FORMS.get(plain, plain)) and isinstance(value, bool) <= (plain is bool):
            return True
    return False


def _member_types(kind: object) -> tuple[object, ...]:
    """Split a union into its members, and replace a Literal by the types of its values."""
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return tuple(each for member in typing.get_args(kind) for each in _member_types(member))
    if typing.get_origin(kind) is typing.Literal:
        return tuple(type(value) for value in typing.get_args(kind))
    return (kind,)


def _check_value(s: Subject, name: str, value: object, *, right: bool) -> None:
    given = f"{name}={value!r}"
    try:
        mixer: Any = s.raw(**{name: value}) if name != "dim" else s.cls(value, **s.options)
        if not right:
            fail(f"{given} is accepted, though the constructor is annotated with another type", seed=s.seed)
        T = s.length if s.grid is not None else min(s.length, mixer.max_len or s.length)
        place = s.place() if mixer.capabilities.grid else {}
        with torch.no_grad():
            y = mixer.eval()(s.x(length=T, dtype=torch.float32)[..., :1].expand(2, T, mixer.dim), **place)
    except MixerError as error:
        text = str(error)
        if s.cls.__name__ not in text or name not in text or "\n" in text:
            fail(f"{given}: the error should be one line naming {s.cls.__name__} and {name}, got {text!r}", seed=s.seed)
    except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        more = (
            "" if name in _annotations(s) else f"; annotate {name}, so that its type is checked before the constructor"
        )
        fail(f"{given}: {type(error).__name__} ({str(error)[:80]}) instead of MixerError{more}", seed=s.seed)
    else:
        if not y.isfinite().all():
            fail(f"{given} is accepted, and the output is not finite", seed=s.seed)
