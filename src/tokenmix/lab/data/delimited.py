"""Tables of cells with a comma, a semicolon or a tab between them, read so that no quote joins lines in silence.

A .csv is read as RFC 4180 says: a cell in quotes may hold anything, and a quote in it is doubled. In a .tsv a quote may
be that, or a part of the text. Its lines decide: whichever reading gives each row the cells of the first line. Where
both do, quotes are text, unless they stand around all cells of a column.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import MixerError
from .lines import filled_lines
from .packed import plain_name

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass
class Delimited:
    """A table whose cells are delimited.

    Attributes:
        names: cells of its first line, without the blanks around them.
        quoted: whether quotes stand around cells; they are part of the text otherwise.
        facts: what was found, for an inventory.
    """

    path: Path
    delimiter: str
    quoted: bool
    names: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def rows(self, *, skip: bool) -> Iterator[tuple[int, list[str]]]:
        """Yield the first line and the cells of each row; ``skip`` leaves out the header.

        Raises:
            MixerError: for a row with more or fewer cells than the first, and for a quote that is not closed.
        """
        if self.quoted:
            found = _quoted_rows(self.path, self.delimiter)
        else:
            found = ((i, i, _cells(line, self.delimiter)) for i, line in enumerate(filled_lines(self.path), 1))
        for i, _, cells in itertools.islice(found, int(skip), None):
            if len(cells) != len(self.names):
                raise self.misfit(i, cells)
            yield i, cells

    def misfit(self, line: int, cells: list[str]) -> MixerError:
        """Return the error for a row that the first one does not fit."""
        said = " ".join(self.delimiter.join(cells).split())[:80]
        cells_are = f"{len(cells)} cell{'s' * (len(cells) != 1)} between {DELIMITERS[self.delimiter]}"
        return MixerError(f"data: line {line} of {self.path} has {cells_are}, line 1 has {len(self.names)}: {said!r}.")

    def preview_row(self, line: int) -> str:
        """Return the beginning of a row, for a message."""
        cells = next(cells for i, cells in self.rows(skip=False) if i >= line)
        return " | ".join(cell.strip()[:24] for cell in cells)


@dataclass
class _Scan:
    """How the lines of a table look if quotes are text.

    Attributes:
        lines: number of lines.
        fault: first line with more or fewer cells than the first, and its cells.
        quotes: whether a cell begins with a quote.
        enclosed: cells of each column that stand in quotes, and how many of them need the quotes.
    """

    lines: int = 0
    fault: tuple[int, list[str]] | None = None
    quotes: bool = False
    enclosed: list[int] = field(default_factory=list)
    needed: int = 0


def open_delimited(path: Path, names: tuple[str, ...]) -> Delimited:
    """Open a table, of which some columns may be known by name; delimiter and quotes are found from its lines."""
    first = next(filled_lines(path), "")
    if not first.strip():
        raise MixerError(f"data: {path} is empty." if not first else f"data: line 1 of {path} is empty.")
    delimiter = _delimiter(path, first, names)
    scan = _scan(path, delimiter)
    table = Delimited(path, delimiter, False)
    if scan.quotes:
        table.quoted = _are_quoted(table, scan, len(_cells(first, delimiter)))
    table.names = [cell.strip() for cell in next(_first_rows(table))]
    return table


def header_of(path: Path, names: tuple[str, ...] = ()) -> list[str]:
    """Return the cells of a table's first line, without reading the others; quotes around them are dropped."""
    first = next(filled_lines(path), "")
    if not first.strip():
        raise MixerError(f"data: {path} is empty." if not first else f"data: line 1 of {path} is empty.")
    return [cell.strip() for cell in next(csv.reader([first], delimiter=_delimiter(path, first, names)))]


def _first_rows(table: Delimited) -> Iterator[list[str]]:
    if table.quoted:
        yield from (cells for _, _, cells in _quoted_rows(table.path, table.delimiter))
    yield from (_cells(line, table.delimiter) for line in filled_lines(table.path))


def _delimiter(path: Path, first: str, names: tuple[str, ...]) -> str:
    """Return a tab for a .tsv; else what gives the first line the names that are asked for, or the most cells."""
    if not plain_name(path).lower().endswith(".csv"):
        return "\t"
    headers = {d: [cell.strip() for cell in next(csv.reader([first], delimiter=d), [])] for d in DELIMITERS}
    fits = [d for d, header in headers.items() if set(names) <= set(header)] or list(DELIMITERS)
    return max(fits, key=lambda d: len(headers[d]))


def _cells(line: str, delimiter: str) -> list[str]:
    return line.rstrip("\r\n").split(delimiter)


def _scan(path: Path, delimiter: str) -> _Scan:
    scan, width, inside = _Scan(), 0, delimiter + '"'
    for scan.lines, line in enumerate(filled_lines(path), 1):
        if scan.lines == 1:
            width = line.count(delimiter)
            scan.enclosed = [0] * (width + 1)
        if line.count(delimiter) != width and scan.fault is None:
            scan.fault = scan.lines, _cells(line, delimiter)
        if line.startswith('"') or inside in line:
            scan.quotes = True
            for i, cell in enumerate(_cells(line, delimiter)[: width + 1]):
                if len(cell) > 1 and cell[0] == cell[-1] == '"':
                    scan.enclosed[i] += 1
                    scan.needed += '""' in cell[1:-1]
    return scan


def _are_quoted(table: Delimited, scan: _Scan, width: int) -> bool:
    """Decide whether quotes stand around cells, and refuse a table for which neither reading is right."""
    rows, joined, longest, fault = 0, 0, (0, 0), None
    try:
        for first, last, cells in _quoted_rows(table.path, table.delimiter):
            rows += 1
            width = len(cells) if rows == 1 else width
            if len(cells) != width:
                table.names = [""] * width
                fault = table.misfit(first, cells)
                break
            if last > first:
                joined += 1
                longest = max(longest, (first, last), key=lambda span: span[1] - span[0])
    except MixerError as why:
        fault = why
    as_csv = plain_name(table.path).lower().endswith(".csv")
    around_all = any(n >= max(scan.lines - 1, 2) for n in scan.enclosed)
    if fault is not None:
        around_many = any(2 * n > scan.lines for n in scan.enclosed)
        if as_csv or around_many:
            raise fault
        if scan.fault is not None:
            table.names = [""] * len(scan.enclosed)
            raise table.misfit(*scan.fault)
        table.facts["quotes"] = "kept as part of the text"
        return False
    if scan.fault is not None:
        _tell_joined(table, joined, longest)
        return True
    if joined and 2 * (joined + max(scan.enclosed)) > rows:  # as where all cells of a column stand in quotes
        _tell_joined(table, joined, longest)
        return True
    if joined and as_csv:
        raise MixerError(
            f"data: in {table.path} a quote joins lines {longest[0]} to {longest[1]} to one row, while each line has "
            + f"{width} cells without it; double a quote that belongs to the text, and put the text in quotes."
        )
    if as_csv or (not joined and (around_all or (scan.needed and scan.needed == sum(scan.enclosed)))):
        return True
    table.facts["quotes"] = "kept as part of the text"
    return False


def _tell_joined(table: Delimited, joined: int, longest: tuple[int, int]) -> None:
    if joined:
        table.facts["rows over several lines"] = f"{joined:,}, the longest in lines {longest[0]} to {longest[1]}"


def _quoted_rows(path: Path, delimiter: str) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the first and the last line and the cells of each row of a table with quotes around cells."""
    reader, before = csv.reader(filled_lines(path), delimiter=delimiter, strict=True), 0
    kept = csv.field_size_limit(sys.maxsize)
    try:
        for cells in reader:
            yield before + 1, reader.line_num, cells or [""]
            before = reader.line_num
    except csv.Error as why:
        raise MixerError(
            f"data: the quote in the row that begins in line {before + 1} of {path} is not closed or stands inside of "
            + f"its cell ({why}, by line {reader.line_num}); a quote that belongs to the text is doubled, and its cell "
            + "stands in quotes."
        ) from None
    finally:
        csv.field_size_limit(kept)
