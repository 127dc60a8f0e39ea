"""Python files of a sweep that register mixers or tasks of one's own."""

from __future__ import annotations

from collections.abc import Iterable

from ...system.modules import import_file


def load_modules(files: Iterable[str]) -> None:
    """Import Python files, each once per process.

    Raises:
        MixerError: for a file that does not exist or cannot be imported.
    """
    for file in files:
        import_file(file, "sweep")
