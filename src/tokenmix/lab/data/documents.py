"""Documents for models of language: a folder of texts, a file, a table, or the sources of Python's library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...errors import MixerError
from .corpora import stdlib_files
from .inventory import Inventory
from .lines import read_text, text_lines
from .rows import Rows, read_tables, split_file, split_rows, tell_splits
from .split_names import splits_named
from .tables import Row, column_names, is_table
from .text_folders import split_text_files

DOCUMENT_SETS = {"stdlib": "files of the Python standard library, already on this machine"}
"""Sets that need no file."""
TEXT_COLUMNS = ("text", "sentence", "document")
"""Columns that are taken for the text of a table when none is named."""


def open_documents(source: str, *, column: str | None = None, split: tuple[float, ...] | None = None) -> Rows:
    """Open documents; each row of the result is one text.

    Args:
        source: a name in ``DOCUMENT_SETS``; a folder, of which each text file is a document, or which has a table for
            each split; a table (.tsv, .csv, .jsonl, .json or .parquet) with one document per row; or a text file, in
            which empty lines separate documents. Files may be packed. A folder of texts with a folder for each of
            train, valid and test is split so.
        column: column of a table that holds the text; None: "text", "sentence" or "document", or the only one there is.
        split: proportions of train, validation and test for documents that are not split yet; None: 90/5/5. A document
            is assigned by its hash, so that equal ones are in one split.

    Raises:
        MixerError: for files that are missing, empty or not UTF-8, and for a column that is not there.
    """
    if source in DOCUMENT_SETS:
        return split_rows(source, _texts(stdlib_files()), split)
    path = Path(source).expanduser()
    if not path.exists():
        raise MixerError(
            f"data: there is no {source!r}; give a folder or file of texts, or one of {', '.join(DOCUMENT_SETS)}."
        )
    if is_table(path):
        return read_tables(path, (column or text_column(path),), split)
    if path.is_dir():
        if any(is_table(file) for files in splits_named(path).values() for file in files):
            return read_tables(path, (column or text_column(split_file(path, "train")),), split)
        return _folder(path, split)
    inventory = Inventory(str(path))
    inventory.count("files")
    rows: list[Row] = [(part,) for part in _paragraphs(path)]
    inventory.count("documents", len(rows))
    return split_rows(path.name, rows, split, inventory)


def _folder(path: Path, split: tuple[float, ...] | None) -> Rows:
    """Read a folder whose text files are documents."""
    inventory = Inventory(str(path))
    parts = split_text_files(path, inventory, by_name=split is None)
    rows = {name: _texts(files, inventory) for name, files in parts.items()}
    if "" in rows:
        return split_rows(path.resolve().name, rows[""], split, inventory)
    empty = [name for name, found in rows.items() if not found]
    if empty:
        raise MixerError(f"data: {path} has no text in its split {empty[0]}.")
    tell_splits(inventory, rows)
    return Rows(path.resolve().name, rows, inventory)


def _paragraphs(path: Path) -> Iterator[str]:
    """Yield what stands between empty lines of a file."""
    part: list[str] = []
    for line in text_lines(path):
        if line.strip("\r\n"):
            part.append(line.replace("\r\n", "\n"))
        elif part:
            yield from _strip_part(part)
            part = []
    yield from _strip_part(part)


def _strip_part(part: list[str]) -> Iterator[str]:
    text = "".join(part).strip()
    if text:
        yield text


def text_column(table: Path) -> str:
    """Return the column of a table that holds its text, when none was named.

    Raises:
        MixerError: if it is not clear which.
    """
    names = column_names(table)
    found = [name for name in TEXT_COLUMNS if name in names] or names
    if len(found) != 1:
        raise MixerError(
            f"data: {table} has the columns {', '.join(names)}; say which is the text: --data.column NAME."
        )
    return found[0]


def _texts(files: list[Path], inventory: Inventory | None = None) -> list[Row]:
    """Return the text of each file that has any; without an inventory, those that are not UTF-8 are left out."""
    rows: list[Row] = []
    for file in files:
        try:
            text = read_text(file).strip()
        except MixerError:
            if inventory is not None:
                raise
            continue
        if text:
            rows.append((text,))
        elif inventory is not None:
            inventory.leave("blank", file.name)
    return rows
