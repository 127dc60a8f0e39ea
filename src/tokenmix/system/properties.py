"""Properties of modules whose errors keep their reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ..errors import MixerError

C = TypeVar("C", bound=type)


def named_errors(cls: C) -> C:
    """Decorate a class of modules: an AttributeError inside one of its properties becomes a MixerError with its reason.

    ``nn.Module`` would say instead that the module has no such property.
    """
    for name, value in list(vars(cls).items()):
        if isinstance(value, property) and value.fget is not None and not hasattr(value.fget, "__wrapped__"):
            setattr(cls, name, property(_name_missing(value.fget, name), value.fset, value.fdel, value.__doc__))
    return cls


def _name_missing(get: Callable[[Any], object], name: str) -> Callable[[Any], object]:
    @wraps(get)
    def read(self: object) -> object:
        try:
            return get(self)
        except AttributeError as why:
            inside = "a layer that was put in the place of another one lacks it"
            raise MixerError(f"{type(self).__name__}.{name}: {' '.join(str(why).split())}; {inside}.") from why

    return read
