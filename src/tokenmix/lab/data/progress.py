"""A line of progress on stderr while much is read."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 2.0  # seconds without a word
PAUSES = {True: 0.5, False: 15.0}  # seconds between two lines, on a terminal and elsewhere


def with_progress(items: Iterable[T], total: int, doing: str, measure: Callable[[], int] | None = None) -> Iterator[T]:
    """Yield the items; if they take longer than ``PATIENCE``, say on stderr how much is done and how long it may take.

    Args:
        total: number of items, or what ``measure`` returns at the end, such as the bytes of a file.
    """
    live = sys.stderr.isatty()
    began = time.monotonic()
    due, said = began + PATIENCE, False
    for count, item in enumerate(items, 1):
        yield item
        now, done = time.monotonic(), measure() if measure else count
        if now >= due or (said and done >= total):
            share = f"{done:,} of {total:,}" if measure is None else f"{done / max(total, 1):.0%}"
            left = (now - began) * (total - done) / max(done, 1)
            text = f"data: {doing}: {share}, {f'{left:.0f} s left' if done < total else 'done'}"
            end = "" if live and done < total else "\n"
            print(f"\r{text:<79}" if live else text, end=end, file=sys.stderr, flush=True)
            due, said = now + PAUSES[live], True
