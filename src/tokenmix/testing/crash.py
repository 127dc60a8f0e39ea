"""Where the code under test raised: the innermost line that its author wrote."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import torch

PACKAGE = str(Path(__file__).parents[1]) + os.sep
SUITE = str(Path(__file__).parent) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages, which may lie inside that of Python's own library."""


def own_line(error: BaseException, *, library: bool = False) -> str:
    """Return the innermost line of an exception that is neither torch's, Python's nor this library's.

    Args:
        library: whether the code under test is part of this library; then only lines of the suite are passed over.

    Returns:
        "file:line, in function: text", or "" where there is no such line.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_foreign(frame.filename, library):
            return f"{_relative_path(frame.filename)}:{frame.lineno}, in {frame.name}: {frame.line}"
    return ""


def is_refusal(error: BaseException) -> bool:
    """Return whether a ``raise`` statement raised an exception, and one that is neither torch's nor Python's."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not (frames[-1].line or "").startswith("raise"):
        return False
    return not _is_foreign(frames[-1].filename, library=True)


def _is_foreign(file: str, library: bool) -> bool:
    if file.startswith(("<", TORCH, SUITE if library else PACKAGE)):
        return True
    return file.startswith(STDLIB) and not any(f"{os.sep}{name}{os.sep}" in file for name in INSTALLED)


def _relative_path(file: str) -> str:
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
