"""A line of progress on stderr while much is read."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 2.0  # seconds without a word
PAUSES = {True: 0.5, False: 15.0}  # seconds between two lines, on a terminal and elsewhere


def with_progress(items: Iterable[T], total: int, doing: str) -> Iterator[T]:
    """Yield the items; if they take longer than ``PATIENCE``, say on stderr how many of how many are done."""
    live = sys.stderr.isatty()
    began = time.monotonic()
    due, said = began + PATIENCE, False
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now >= due or (said and done == total):
            left = (now - began) * (total - done) / done
            text = f"data: {doing}: {done:,} of {total:,}, {f'{left:.0f} s left' if done < total else 'done'}"
            end = "" if live and done < total else "\n"
            print(f"\r{text:<79}" if live else text, end=end, file=sys.stderr, flush=True)
            due, said = now + PAUSES[live], True
