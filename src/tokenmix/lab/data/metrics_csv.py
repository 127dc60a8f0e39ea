"""Lines of metrics as a CSV table: a row for each line, a column for each number.

The columns follow from the fields alone, not from the order in which they come. A line leaves the columns it does not
have empty.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...system.files import whole_file
from ...types import Record
from .records import read_records

Row = dict[str, Any]

ORDER = ("run", "kind", "split", "phase", "step", "seconds", "tokens", "images", "loss", "bpb", "bpd", "lr")
"""The first columns, as far as there are any; the others follow in alphabetical order."""
OF_EVALUATION = ("seconds", "images")
"""Fields of an evaluation that mean something else in lines of training: there they count from the run's start."""


def flatten_metrics(line: Record) -> Row:
    """Return a line of metrics without nesting: ``aux.NAME`` for its auxiliary losses, ``8x8`` for a size.

    What an evaluation took and counted is called ``eval_seconds`` and ``eval_images``.
    """
    row: Row = {}
    for name, value in line.items():
        if line.get("kind") == "eval" and name in OF_EVALUATION:
            name = f"eval_{name}"
        if isinstance(value, dict):
            row |= {f"{name}.{inner}": x for inner, x in value.items()}
        else:
            row[name] = "x".join(map(str, value)) if isinstance(value, list) else value
    return row


def write_csv(out: Path, lines: Iterable[Record]) -> None:
    """Write lines of metrics as a table, completely or not at all."""
    rows = [flatten_metrics(line) for line in lines]
    found = {name for row in rows for name in row}
    columns = [*(name for name in ORDER if name in found), *sorted(found - set(ORDER))]
    table: list[Iterable[object]] = [columns, *(_cells(row, columns) for row in rows)] if rows else []
    with whole_file(out) as f:
        f.write("".join(map(_csv_line, table)).encode())


def append_csv(out: Path, metrics: Path, line: Record) -> None:
    """Append the last line of a metrics file to its table.

    The table is written anew from the metrics where it cannot take the line: where it is missing, lacks a column, or
    ends in the middle of a row.
    """
    row = flatten_metrics(line)
    columns = _columns(out)
    if columns is None or not row.keys() <= set(columns):
        write_csv(out, read_records(metrics)[0])
        return
    with out.open("ab") as f:
        f.write(_csv_line(_cells(row, columns)).encode())


def _columns(path: Path) -> list[str] | None:
    """Return the columns of a table; None if it is missing or its last row is not complete."""
    try:
        with path.open("rb") as f:
            head = f.readline()
            f.seek(-1, os.SEEK_END)
            whole = f.read() == b"\n"
    except OSError:  # also where there is no last byte
        return None
    return next(csv.reader([head.decode("utf-8", "replace")])) if whole and head.strip() else None


def _cells(row: Row, columns: list[str]) -> list[object]:
    return [row.get(name, "") for name in columns]


def _csv_line(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
