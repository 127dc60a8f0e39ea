"""Lines of text files, plain or packed, with errors that name the file and the line."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import MixerError
from .bounds import Bounds
from .cache import read_chunks

PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


def plain_name(path: Path) -> str:
    """Return the name of a file without the ending that says how it is packed."""
    return path.stem if path.suffix in PACKED else path.name


def read_start(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, which is unpacked if its name ends in .gz or .xz.

    Raises:
        MixerError: if the file cannot be read.
    """
    with _opened(path) as file:
        start: bytes = file.read(count)
    return start


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, which is unpacked if its name ends in .gz or .xz.

    Raises:
        MixerError: if the file cannot be read, is not UTF-8 or unpacks to far more than texts do.
    """
    with _opened(path) as file:
        chunks = read_chunks(file)
        raw = b"".join(Bounds().stream(path, chunks) if path.suffix in PACKED else chunks)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as why:
        line = raw[: why.start].count(b"\n") + 1
        raise MixerError(
            f"data: {path} is not UTF-8: byte {why.start} in line {line} is {raw[why.start]:#04x}; convert it, for "
            + "example with `iconv -f latin1 -t utf-8`."
        ) from None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file, plain or packed, for reading bytes; what goes wrong while it is open becomes a MixerError."""
    try:
        with PACKED.get(path.suffix, open)(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as why:
        raise MixerError(f"data: {path} cannot be read ({getattr(why, 'strerror', None) or why}).") from None


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file, of which none may be empty.

    Raises:
        MixerError: for an empty line, with its number, and for a file without lines.
    """
    lines = read_text(path).replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise MixerError(f"data: {path} is empty.")
    for i, line in enumerate(lines, 1):
        if not line.strip():
            raise MixerError(f"data: line {i} of {path} is empty; every line must hold a text.")
    return [line.strip() for line in lines]


def read_columns(path: Path, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Read named columns of a table: tab-separated values, or one JSON object per line.

    A first line of a .tsv that holds the names is a header, and says where the columns are; otherwise they are the
    first ones.

    Raises:
        MixerError: for a missing or empty column, with the number of its line.
    """
    lines = read_lines(path)
    table = plain_name(path).endswith((".tsv", ".txt"))
    first, places = 1, tuple(range(len(names)))
    if table:
        header = [part.strip() for part in lines[0].split("\t")]
        if set(names) <= set(header):
            first, places, lines = 2, tuple(header.index(name) for name in names), lines[1:]
    rows = []
    for i, line in enumerate(lines, first):
        found = _tsv_row(line, places) if table else _json_row(line, names)
        if found is None or not all(part.strip() for part in found):
            needed = f"{len(names)} columns separated by tabs" if table else f"an object with {' and '.join(names)}"
            raise MixerError(f"data: line {i} of {path} must hold {needed}, none of them empty; got {line[:80]!r}.")
        rows.append(tuple(part.strip() for part in found))
    if not rows:
        raise MixerError(f"data: {path} has a header and no rows.")
    return rows


def column_names(path: Path) -> list[str]:
    """Return the names of a table's columns: its first line, or what its first JSON object names."""
    line = read_lines(path)[0]
    if plain_name(path).endswith(".tsv"):
        return [part.strip() for part in line.split("\t")]
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise MixerError(f"data: line 1 of {path} must hold an object; got {line[:80]!r}.")
    return list(row)


def _tsv_row(line: str, places: tuple[int, ...]) -> list[str] | None:
    parts = line.split("\t")
    return [parts[i] for i in places] if len(parts) > max(places) else None


def _json_row(line: str, names: tuple[str, ...]) -> list[str] | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or any(not isinstance(row.get(name), str | int) for name in names):
        return None
    return [str(row[name]) for name in names]


def is_table(path: Path) -> bool:
    """Return whether a file is a table by its name: .tsv, .jsonl or .json, also packed."""
    return plain_name(path).endswith((".tsv", ".jsonl", ".json"))
