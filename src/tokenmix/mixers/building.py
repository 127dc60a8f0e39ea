"""How a mixer is built: before its constructor runs, options of another kind than its annotations say are refused in the mixer's name."""

from __future__ import annotations

import typing
from abc import ABCMeta
from collections.abc import Sequence
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar

import torch

from ..errors import MixerError

Built = TypeVar("Built")
LARGEST = 2**31 - 1  # a size beyond it fits nowhere
LARGEST_SEED = 2**63 - 1
LARGEST_FLOAT = torch.finfo(torch.float32).max  # what a parameter holds
WORDS: dict[Any, str] = {int: "an integer", float: "a finite number", bool: "True or False", str: "a string", NoneType: "None"}
TOO_LARGE = ("allocate memory", "out of memory", "overflow")  # torch says it so


class Checked(ABCMeta):
    """The class of mixer classes: what calls a constructor, with the options checked first."""

    def __call__(cls: type[Built], *args: Any, **options: Any) -> Built:
        """A mixer of this class, or one line that says which option is not of its kind."""
        kinds = kinds_of(cls)  # type: ignore[arg-type]  # mypy knows no metaclass's self
        for name, value in [*zip(("dim",), args, strict=False), *options.items()]:
            limit = LARGEST_SEED if name == "seed" else LARGEST
            if name in kinds and not _fits(value, kinds[name], limit):
                most = f" of at most {limit}" if isinstance(value, int) and value > limit else ""
                raise MixerError(f"{cls.__name__}: {name} must be {_words(kinds[name])}{most}, got {value!r}.")
        try:
            return super().__call__(*args, **options)  # type: ignore[misc, no-any-return]  # the same
        except RuntimeError as why:
            if any(word in str(why) for word in TOO_LARGE):
                given = ", ".join([f"dim={args[0]!r}" for _ in args[:1]] + [f"{name}={value!r}" for name, value in options.items()])
                raise MixerError(f"{cls.__name__}: its parameters do not fit into memory with {given}.") from None
            raise


@lru_cache(256)
def kinds_of(cls: type) -> dict[str, Any]:
    """The annotations of a constructor by name; those of a stranger's that cannot be read say nothing."""
    try:
        return typing.get_type_hints(cls.__init__)  # type: ignore[misc]  # of the class at hand
    except (NameError, TypeError, AttributeError):
        return {}


def _fits(value: Any, kind: Any, limit: int) -> bool:
    """Whether a value is of this kind; of kinds not in ``WORDS``, a dict above all, the constructor knows more."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, each, limit) for each in inner)
    if kind in (int, float):
        known, most = int if kind is int else (int, float), limit if isinstance(value, int) else LARGEST_FLOAT
        return isinstance(value, known) and not isinstance(value, bool) and abs(value) <= most  # type: ignore[arg-type]  # NaN is not
    if origin in (list, Sequence):
        return isinstance(value, (list, tuple)) and all(_fits(each, inner[0], limit) for each in value)
    return kind not in WORDS or isinstance(value, kind)


def _words(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return " or ".join(_words(each) for each in inner)
    if origin in (list, Sequence):
        return f"a list, of which each is {_words(inner[0])}"
    return WORDS.get(kind, str(kind))
