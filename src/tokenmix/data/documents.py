"""Documents for models of language: a folder of texts, a file, a table, or the sources of Python's library."""

from __future__ import annotations

from pathlib import Path

from ..errors import MixerError
from .corpora import stdlib_files, text_files
from .lines import column_names, is_table, read_text
from .rows import Row, Rows, read_tables, split_file, split_rows

DOCUMENT_SETS = {"stdlib": "files of the Python standard library, already on this machine"}
"""Sets that need no file."""
TEXT_COLUMNS = ("text", "sentence", "document")
"""Columns that are taken for the text of a table when none is named."""


def open_documents(source: str, *, column: str | None = None, split: tuple[float, ...] | None = None) -> Rows:
    """Open documents; each row of the result is one text.

    Args:
        source: a name in ``DOCUMENT_SETS``; a folder, of which each text file is a document, or which has a table for
            each split; a table (.tsv or .jsonl) with one document per row; or a text file, in which empty lines
            separate documents. Files may be packed (.gz or .xz).
        column: column of a table that holds the text; None: "text", "sentence" or "document", or the only one there is.
        split: proportions of train, validation and test for documents that are not split yet; None: 90/5/5. A document
            is assigned by its hash, so that equal ones are in one split.

    Raises:
        MixerError: for files that are missing, empty or not UTF-8, and for a column that is not there.
    """
    if source in DOCUMENT_SETS:
        return split_rows(source, _texts(stdlib_files(), lenient=True), split)
    path = Path(source).expanduser()
    if not path.exists():
        raise MixerError(
            f"data: there is no {source!r}; give a folder or file of texts, or one of {', '.join(DOCUMENT_SETS)}."
        )
    if is_table(path):
        return read_tables(path, (column or text_column(path),), split)
    if path.is_dir():
        if any(is_table(file) for file in path.iterdir()):
            return read_tables(path, (column or text_column(split_file(path, "train")),), split)
        return split_rows(path.resolve().name, _texts(text_files(path)), split)
    parts = [part.strip() for part in read_text(path).replace("\r\n", "\n").split("\n\n")]
    return split_rows(path.name, [(part,) for part in parts if part], split)


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


def _texts(files: list[Path], *, lenient: bool = False) -> list[Row]:
    """Return the text of each file that has any; ``lenient`` leaves out those that are not UTF-8."""
    rows: list[Row] = []
    for file in files:
        try:
            text = read_text(file).strip()
        except MixerError:
            if not lenient:
                raise
            continue
        if text:
            rows.append((text,))
    return rows
