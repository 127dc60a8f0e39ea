"""Tables, numbers and names of folders as text for a terminal or a page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

MISSING = "not measured"
"""Placeholder for a missing number."""
TERMINAL = 120
"""Columns of a line if the terminal is wider, or if there is no terminal."""
SWEPT = re.compile(r"rate_.+_seed_\d+")
"""The last folder of a sweep's run; its parent is the folder of the row."""


def printable(text: str) -> str:
    """Escape control characters as \\xNN, so that names and files cannot send escape sequences to a terminal."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def whole_number(text: str) -> int | None:
    """Parse a number of at most 18 decimal digits; return None for anything else.

    ``int`` itself raises an error for several thousand digits.
    """
    return int(text) if text.isdecimal() and len(text) <= 18 else None


@dataclass(frozen=True)
class Table:
    """A captioned table. The first column holds the row's name; ``notes`` follow below it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Format the table for a terminal; transpose it if it is too wide."""
        lines = [self.columns, *self.rows]
        if sum(max(map(len, column)) + 2 for column in zip(*lines, strict=True)) > TERMINAL:
            lines = [list(column) for column in zip(*lines, strict=True)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        body = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        return "\n".join([self.title, body[0], "-" * len(body[0]), *body[1:], *self.notes])


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with fixed digits; a missing or non-finite one is described in words."""
    if value is None:
        return MISSING
    return f"{value:,.{digits}f}" if math.isfinite(value) else "not finite"


def size(n: float | None) -> str:
    """Format bytes with three figures, in powers of 1024: 1536 -> "1.50 KiB"."""
    if n is None:
        return MISSING
    return f"{n:.0f} B" if n < 1000 else _three(n / 1024, 1024, (" KiB", " MiB", " GiB"))


def seconds(value: float) -> str:
    """Format seconds with three figures and a unit: 0.00123 -> "1.23 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * scale or unit == "us":
            return f"{_figures(value / scale)} {unit}"
    raise AssertionError


def si(n: float) -> str:
    """Format a number with three figures and an SI prefix: 1234567 -> "1.23 M"."""
    return f"{n:.0f}" if n < 1000 else _three(n / 1000, 1000, (" k", " M", " G", " T"))


def _three(n: float, step: int, units: tuple[str, ...]) -> str:
    """Format n in the first unit that keeps it below a thousand."""
    while n >= 999.5 and len(units) > 1:
        n, units = n / step, units[1:]
    return f"{_figures(n)}{units[0]}"


def _figures(n: float) -> str:
    """Format a number below a thousand with three figures."""
    return f"{n:.{2 if n < 9.995 else 1 if n < 99.95 else 0}f}"


def named_apart(paths: Sequence[Path]) -> list[str]:
    """Name run directories by their last folder, or if names coincide, by as many folders as distinguish them.

    A run of a sweep, whose last folder has only its rate and seed, is named with its row: "attention/rate_0.01_seed_0";
    a slash in the row's name, which its folder has as %2F, is one again.
    """
    found = [path.resolve() for path in paths]
    names = {path: "/".join(path.parts[-2 if SWEPT.fullmatch(path.name) else -1 :]) for path in found}
    for depth in range(2, max((len(path.parts) for path in found), default=0)):
        given = list(names.values())
        names |= {path: "/".join(path.parts[-depth:]) for path, name in names.items() if given.count(name) > 1}
    swept = {path for path in found if SWEPT.fullmatch(path.name)}
    return [unquote(names[path]) if path in swept else names[path] for path in found]
