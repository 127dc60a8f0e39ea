"""What every verb prints with: results on stdout, progress on stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from typing import TextIO

from ...system.text import TERMINAL

REPEAT = 2.0
"""Seconds between two lines of progress where the terminal cannot overwrite one."""


def say(text: object, stream: TextIO | None = None) -> None:
    r"""Print a line in any terminal's encoding; characters that it lacks are written as \xNN or \uNNNN."""
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(str(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def say_error(text: object) -> None:
    """Print a line on stderr."""
    say(text, sys.stderr)


def can_show(text: str, stream: TextIO | None = None) -> bool:
    """Return whether the terminal or file that output goes to has all characters of a text.

    The console of Linux has an encoding with all characters, and a font with few.
    """
    stream = sys.stdout if stream is None else stream
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeError, LookupError):
        return False
    return not stream.isatty() or os.environ.get("TERM") not in ("linux", "dumb")


def say_json(value: object) -> None:
    """Print a value as indented JSON."""
    say(json.dumps(value, indent=1))


def wrap_text(label: str, text: str, indent: int) -> list[str]:
    """Return label and text as lines of the terminal's width, at most ``TERMINAL``; later lines are indented."""
    width = max(min(TERMINAL, shutil.get_terminal_size((TERMINAL, 24)).columns), indent + 1)
    return textwrap.wrap(
        text,
        width,
        initial_indent=label,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def shorten_text(label: str, text: str) -> str:
    """Return label and text on one line of the terminal's width, without the words that do not fit."""
    width = min(TERMINAL, shutil.get_terminal_size((TERMINAL, 24)).columns)
    return label + textwrap.shorten(text, max(width - len(label), 20), placeholder=" ...", break_on_hyphens=False)


def progress(quiet: float = 0.0) -> Callable[[str], None]:
    """Return a function that shows one line of progress on stderr.

    A terminal's line is overwritten, and cleared by an empty line; elsewhere at most one line is written every
    ``REPEAT`` seconds.

    Args:
        quiet: seconds before the first line where there is no terminal.
    """
    due = [time.monotonic() + quiet]

    def tell(line: str) -> None:
        if sys.stderr.isatty():
            say_part(f"\r\x1b[K{line[:100]}")
        elif line and time.monotonic() >= due[0]:
            due[0] = time.monotonic() + REPEAT
            say_error(line)

    return tell


def say_part(text: str) -> None:
    """Write a part of a line on stderr, in any terminal's encoding."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stderr.flush()
