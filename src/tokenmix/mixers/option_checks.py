"""Checks of constructor options against their annotations, before the constructor runs."""

from __future__ import annotations

import inspect
import typing
from abc import ABCMeta
from collections.abc import Sequence
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar

import torch

from ..errors import MixerError
from ..system.memory import in_memory
from .facts import check_names

Built = TypeVar("Built")
LARGEST = 2**31 - 1  # a larger size fits no memory
LARGEST_SEED = 2**63 - 1
LARGEST_FLOAT = torch.finfo(torch.float32).max  # the range of a float32 parameter
WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a finite number",
    bool: "True or False",
    str: "a string",
    NoneType: "None",
}


class Checked(ABCMeta):
    """The metaclass of mixers: it checks the options before it calls the constructor."""

    def __call__(cls: type[Built], *args: Any, **options: Any) -> Built:
        """Build a mixer of this class.

        Raises:
            MixerError: if an option does not have the annotated type, or if the parameters do not fit into memory.
        """
        kinds = kinds_of(cls)  # type: ignore[arg-type]  # mypy does not know the metaclass's self
        for name, value in [*zip(("dim",), args, strict=False), *options.items()]:
            limit = LARGEST_SEED if name == "seed" else LARGEST
            if name in kinds and not _fits(value, kinds[name], limit):
                most = f" of at most {limit}" if isinstance(value, int) and value > limit else ""
                raise MixerError(f"{cls.__name__}: {name} must be {_words(kinds[name])}{most}, got {value!r}.")
        given = ", ".join(f"{name}={value!r}" for name, value in [*zip(("dim",), args, strict=False), *options.items()])
        with in_memory(lambda why: f"{cls.__name__}: its parameters do not fit into memory with {given} ({why})."):
            built: Built = super().__call__(*args, **options)  # type: ignore[misc]  # as above
        check_names(cls.__name__, vars(built))
        return built

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the constructor, for ``help`` and editors."""
        whole = inspect.signature(cls.__init__)  # type: ignore[misc]  # of this very class
        return whole.replace(parameters=list(whole.parameters.values())[1:], return_annotation=whole.empty)

    def __setattr__(cls, name: str, value: Any) -> None:
        """Refuse a fact as an attribute of the class, where nothing would read it."""
        check_names(cls.__name__, (name,))
        super().__setattr__(name, value)


@lru_cache(256)
def kinds_of(cls: type) -> dict[str, Any]:
    """Return the annotations of a constructor by name; an empty dict where they cannot be resolved."""
    try:
        return typing.get_type_hints(cls.__init__)  # type: ignore[misc]  # the class's own __init__
    except (NameError, TypeError, AttributeError):
        return {}


def _fits(value: Any, kind: Any, limit: int) -> bool:
    """Return whether a value has this annotated type.

    Types that are not in ``WORDS``, such as dict, are accepted here and checked by the constructor.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, each, limit) for each in inner)
    if origin is Literal:  # the constructor says which strings there are
        return any(_fits(value, type(each), limit) for each in inner)
    if kind in (int, float):
        known, most = int if kind is int else (int, float), limit if isinstance(value, int) else LARGEST_FLOAT
        return isinstance(value, known) and not isinstance(value, bool) and abs(value) <= most  # type: ignore[arg-type]  # false for NaN
    if origin in (list, Sequence):
        return isinstance(value, (list, tuple)) and all(_fits(each, inner[0], limit) for each in value)
    return kind not in WORDS or isinstance(value, kind)


def _words(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return " or ".join(_words(each) for each in inner)
    if origin is Literal:
        return " or ".join(dict.fromkeys(_words(type(each)) for each in inner))
    if origin in (list, Sequence):
        return f"a list in which each item is {_words(inner[0])}"
    return WORDS.get(kind, str(kind))
