"""Recognise errors of sizes that do not fit into memory, and reword them in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import MixerError

WORDS = (
    "allocate memory",
    "out of memory",
    "enough memory",
    "Storage size calculation overflowed",
    "Overflow when unpacking",
    "too large to convert",
)
"""Words in the errors that torch and Python raise for a size; a size beyond 64 bits is a TypeError there."""
KINDS = (RuntimeError, MemoryError, TypeError, ValueError, OverflowError)
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def lack_of_memory(why: BaseException) -> str:
    """Describe an out-of-memory error in a few words, with the requested size if the error has it.

    Returns:
        A few words; "" for an error about anything else.
    """
    said = str(why)
    if not isinstance(why, MemoryError) and (isinstance(why, MixerError) or not any(word in said for word in WORDS)):
        return ""
    asked = re.search(r"to allocate ([\d.]+) ?([KMGTPE]iB|bytes)", said)
    return f"out of memory{f', asked for {_readable(float(asked[1]), asked[2])} at once' if asked else ''}"


@contextmanager
def in_memory(say: Callable[[str], str]) -> Iterator[None]:
    """Convert an out-of-memory error inside the block to a ``MixerError`` whose text ``say`` makes from a few words."""
    try:
        yield
    except KINDS as why:
        found = lack_of_memory(why)
        if not found:
            raise
        raise MixerError(say(found)) from why


def _readable(number: float, unit: str) -> str:
    at = UNITS.index(unit)
    while number >= 1024 and at + 1 < len(UNITS):
        number, at = number / 1024, at + 1
    return f"{number:,.4g} {UNITS[at]}"
