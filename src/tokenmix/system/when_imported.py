"""Import a module of ours as soon as one of another package has been imported, which may be never."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Watch(MetaPathFinder):
    """Wait for the import of one module: find it as other finders do, and import ``ours`` after it has run."""

    def __init__(self, module: str, ours: str):
        self.module, self.ours = module, ours

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module, once."""
        if name != self.module or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _import_ours(self.ours)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one module's loader
        return spec


def import_after(module: str, ours: str) -> None:
    """Import ``ours`` now if ``module`` is imported already, else right after its import.

    Where the other package is too old or too new for ``ours``, its import goes on without it.
    """
    if module in sys.modules:
        _import_ours(ours)
    elif not any(isinstance(finder, Watch) and finder.ours == ours for finder in sys.meta_path):
        sys.meta_path.insert(0, Watch(module, ours))


def _import_ours(ours: str) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module(ours)
