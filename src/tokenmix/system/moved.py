"""Answer imports of modules that moved into the laboratory with their new names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

MOVED = (
    "advise",
    "anatomy",
    "bench",
    "cli",
    "data",
    "demo",
    "explain",
    "papers",
    "recipes",
    "report",
    "sweep",
    "train",
)
"""Folders that lay in the package itself before 0.1."""


class OldNames(MetaPathFinder):
    """Refuse the old name of a module in one line that gives the new one."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise for a name that moved, and find nothing else."""
        parts = name.split(".")
        if parts[0] == "tokenmix" and len(parts) > 1 and parts[1] in MOVED:
            new = ".".join(["tokenmix", "lab", *parts[1:]])
            raise ModuleNotFoundError(f"{name} is now {new}.", name=name)


def answer_old_names() -> None:
    """Raise an error that names the new place if an old name is imported; real modules are always found first."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())
