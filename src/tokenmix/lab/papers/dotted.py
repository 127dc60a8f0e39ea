"""Dotted paths below ``tokenmix`` that data files name, and where their code is."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from ...errors import MixerError
from ...system.config import nearest


def find_code(path: str) -> Any:
    """Import the longest part of a dotted path that is a module, and take the rest from it."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        name = ".".join(["tokenmix", *parts[:cut]])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as why:
            if why.name != name and not name.startswith(f"{why.name}."):
                raise
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                known = [name for name in vars(found) if not name.startswith("_")]
                raise MixerError(f"papers: {path!r} names nothing in tokenmix; {nearest(part, known)}.")
            found = getattr(found, part)
        return found
    raise MixerError(f"papers: {path!r} names nothing in tokenmix.")


def locate_code(path: str) -> tuple[str, int]:
    """Find what a dotted path below ``tokenmix`` names.

    Returns:
        Its file, relative to the folder above the package, and the line of its definition.
    """
    found, root = inspect.unwrap(find_code(path)), Path(__file__).resolve().parents[3]
    file = Path(inspect.getsourcefile(found) or "").resolve()
    lines, first = inspect.getsourcelines(found)
    ahead = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "class "))), 0)
    return str(file.relative_to(root)), max(first, 1) + ahead
