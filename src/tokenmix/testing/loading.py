"""Find the object that ``tokenmix check`` names: ``package:Name`` or ``file.py:Name``, from the working folder too."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from ..errors import MixerError
from ..system.modules import here_on_path
from ..system.torchvision import torchvision_hint
from .crash import own_line

FORMS = "package:Name or file.py:Name"


def load_named(target: str) -> Any:
    """Return the object that ``package:Name`` or ``file.py:Name`` names.

    Raises:
        MixerError: if the module cannot be imported, or has no such name.
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise MixerError(f"check: {target!r} names nothing; write {FORMS}.")
    module = _file(where) if where.endswith(".py") else _module(where, where, None)
    if not hasattr(module, name):
        raise MixerError(f"check: {where} has no {name!r}.")
    return getattr(module, name)


def load_reference(target: str) -> Callable[..., Tensor]:
    """Return the function that ``--reference`` names.

    Raises:
        MixerError: if it cannot be imported or called.
    """
    found = load_named(target)
    if not callable(found) or isinstance(found, type):
        raise MixerError(f"check: --reference is a function, {FORMS}, got {target!r}, which is {describe_kind(found)}.")
    return found


def describe_kind(found: object) -> str:
    """Return the kind of an object, for messages."""
    return f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"


def one_line(error: BaseException) -> str:
    """Return the first 200 characters of a message on one line."""
    return " ".join(str(error).split())[:200]


def place_of(error: BaseException) -> str:
    """Return the line of the user's own code that raised, in brackets; "" where there is none."""
    line = own_line(error)
    return f" ({line})" if line else ""


def _file(where: str) -> ModuleType:
    path = Path(where).resolve()
    if not path.is_file():
        raise MixerError(f"check: there is no file {where}; give one that exists, or an importable package:Name.")
    if not path.stem.isidentifier():
        raise MixerError(f"check: {path.name} cannot be imported under this name; rename it to a name such as mine.py.")
    module = _module(where, path.stem, str(path.parent))
    if Path(module.__file__ or "").resolve() != path:
        raise MixerError(f"check: the name of {where} is that of another module, {path.stem}; rename the file.")
    return module


def _module(where: str, name: str, folder: str | None) -> ModuleType:
    with here_on_path(folder):
        try:
            return importlib.import_module(name)
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(error)}{place_of(error)}{torchvision_hint(error)}"
            raise MixerError(f"check: cannot import {where!r}: {why}") from error
