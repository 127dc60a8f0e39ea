"""Collect attempts to break the library, each a function that returns what happened in one line.

    python -m benchmarks.robustness                    # run all, print the table
    python -m benchmarks.robustness --only streaming   # those whose title or area holds the word
    python -m benchmarks.robustness --as before        # record under this column of results/robustness.json

Each module of this package is an area. Each attempt runs in its own process, so a crash or hang of one is only a line
of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """Describe one attempt: a number within its area, a title, and the function that makes it."""

    number: str
    title: str
    run: Callable[[], str]


def attempt(number: str, title: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Mark a function as an attempt; it returns one line, and an exception it raises is reported as that line."""

    def mark(run: Callable[[], str]) -> Callable[[], str]:
        run.attempt = Attempt(number, title, run)
        return run

    return mark
