"""Python modules of the user's own, found from the working folder as ``python`` finds them.

A name may come from a file that somebody else wrote, such as the config of a run or of a Hugging Face model, and must
not import code by itself. A module is therefore imported only where its name was typed, or where TOKENMIX_MODULES names
it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ..errors import MixerError
from .torchvision import torchvision_hint

ALLOWED = "TOKENMIX_MODULES"
"""The variable with the modules that any run may import: names, or paths of Python files, with commas between them."""


class _Names(threading.local):
    """Whether the names that this thread looks up were typed."""

    typed = False


_names = _Names()


@contextmanager
def here_on_path(folder: str | None = None) -> Iterator[None]:
    """Have the working folder, or another one, among those that modules are imported from, inside the block."""
    here = os.getcwd() if folder is None else folder
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


@contextmanager
def typed_names() -> Iterator[None]:
    """Let names import their modules inside the block, where they are those that the user typed."""
    before, _names.typed = _names.typed, True
    try:
        yield
    finally:
        _names.typed = before


def import_named(package: str, who: str, what: str) -> ModuleType:
    """Return a module that is imported already, that TOKENMIX_MODULES names, or, in ``typed_names``, any module.

    Args:
        who: who asks, in errors.
        what: what the module has, in errors.

    Raises:
        MixerError: if the module may not or cannot be imported.
    """
    given = [each for each in os.environ.get(ALLOWED, "").split(",") if each]
    named = {Path(each).stem if each.endswith(".py") else each: each for each in given}
    if package.endswith(".py"):
        if not (_names.typed or Path(package).stem in named):
            raise MixerError(f"{who}: the file {package!r} of {what} is not allowed; set {ALLOWED}={package}.")
        return import_file(package, who)
    if not (_names.typed or package in sys.modules or package in named):
        raise MixerError(
            f"{who}: the module {package!r} of {what} is not imported; import it first, or set "
            + f"{ALLOWED}={package} if you trust it; `tokenmix resume` takes --allow-code as well."
        )
    if package not in sys.modules and named.get(package, "").endswith(".py"):
        return import_file(named[package], who)
    try:
        with here_on_path():
            return importlib.import_module(package)
    except Exception as why:
        raise MixerError(
            f"{who}: the module {package!r} of {what} cannot be imported "
            + f"({type(why).__name__}: {' '.join(str(why).split())}); run in the folder that contains it."
        ) from why


def import_file(file: Path | str, who: str) -> ModuleType:
    """Import a Python file as the module of its name, once per process.

    Raises:
        MixerError: for a file that does not exist, cannot be imported, or is called like a module that is another.
    """
    path = Path(file).resolve()
    known = sys.modules.get(path.stem)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "").resolve() == path:
            return known
        raise MixerError(f"{who}: the module {file} is called as {known!r}, which is imported already; rename it.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise MixerError(f"{who}: the module {file} is not a Python file that exists.")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as why:
        del sys.modules[path.stem]
        reason = f"{type(why).__name__}: {why}"
        raise MixerError(f"{who}: the module {file} cannot be imported ({reason}){torchvision_hint(why)}.") from why
    return module
