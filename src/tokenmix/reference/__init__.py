"""The papers' equations as written: float64, loops and sums over t', no tricks. Library code never imports this.

Each public function in a file of this folder is available here by its name: ``tokenmix.reference.aft_full``.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    def __getattr__(name: str) -> Callable[..., Any]:
        """Return any equation, for the type checker."""


def _equations() -> dict[str, object]:
    found: dict[str, object] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        own = {
            name: f
            for name, f in vars(module).items()
            if not name.startswith("_") and getattr(f, "__module__", "") == module.__name__
        }
        twice = found.keys() & own.keys()
        if twice:
            raise ImportError(
                f"tokenmix.reference: {', '.join(sorted(twice))} of {file.name}.py already exist in another file"
            )
        found |= own
    return found


_found = _equations()
globals().update(_found)
__all__ = sorted(_found)
