"""Named columns of tables: .csv, .tsv, lines or an array of JSON, and Parquet where pyarrow is installed.

Columns are read by their names. Every row is held to the header, and what cannot be read is refused with its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import MixerError
from ...types import Record
from .bounds import check_regular
from .delimited import Delimited, header_of, open_delimited
from .inventory import Inventory, first_names
from .lines import filled_lines, read_text
from .packed import plain_name

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Row = tuple[str, ...]
DELIMITED = (".tsv", ".csv", ".tab")
ENDINGS = (*DELIMITED, ".jsonl", ".ndjson", ".json", ".parquet")
KINDS = ".tsv, .csv, .jsonl, .json or .parquet"
NAMES = {"answer", "article", "body", "completion", "context", "document", "highlights", "id", "index", "input"}
NAMES |= {"instruction", "label", "labels", "output", "prompt", "question", "reference", "response", "sentence"}
NAMES |= {"source", "src", "summary", "target", "text", "tgt", "title", "trg"}
NAMES |= {"arabic", "chinese", "czech", "dutch", "english", "french", "german", "hindi", "italian", "japanese"}
NAMES |= {"korean", "polish", "portuguese", "russian", "spanish", "turkish"}
NAMES |= {"ara", "ces", "chi", "deu", "eng", "fra", "fre", "ger", "hin", "ita", "jpn", "kor", "nld", "pol", "por"}
NAMES |= {"rus", "spa", "swe", "tur", "ukr", "zho"}
CODE = re.compile(r"[a-z]{2}([_-][A-Za-z]{2,4})?")
"""What a first line that names its columns holds, most often: words such as these, or codes of languages."""


def is_table(path: Path) -> bool:
    """Return whether a file is a table by its name, also packed."""
    return plain_name(path).lower().endswith(ENDINGS)


def column_names(path: Path) -> list[str]:
    """Return the names of a table's columns: its header, or what its first JSON object names."""
    if _is_delimited(path):
        return header_of(path)
    if _is_parquet(path):
        return list(_parquet(path).schema_arrow.names)
    for _, row in _json_objects(path, ()):
        return list(row)
    raise MixerError(f"data: {path} has no rows.")


def read_columns(path: Path, names: Row, inventory: Inventory | None = None, *, unnamed: bool = False) -> list[Row]:
    """Read named columns of a table.

    Args:
        names: of the columns.
        inventory: what was found is added to it.
        unnamed: whether a .tsv or .csv may lack a header; its columns, of which it has no others, are then those of
            ``names`` in their order.

    Raises:
        MixerError: for a column that is not there, a cell that is empty and a row that the header does not fit, with
            the number of its line.
    """
    if _is_delimited(path):
        rows = _read_delimited(path, names, inventory, unnamed)
    elif _is_parquet(path):
        rows = _read_parquet(path, names)
    else:
        rows = [tuple(_json_cell(row, name, names, i, path) for name in names) for i, row in _json_objects(path, names)]
    if not rows:
        raise MixerError(f"data: {path} has a header and no rows.")
    if inventory is not None:
        inventory.count("files")
        inventory.count("rows", len(rows))
        inventory.found.setdefault("columns", ", ".join(names))
    return rows


def has_header(path: Path, names: Row) -> bool:
    """Return whether a table names these columns; JSON and Parquet always name theirs."""
    return not _is_delimited(path) or set(names) <= set(header_of(path, names))


def _is_delimited(path: Path) -> bool:
    return plain_name(path).lower().endswith(DELIMITED)


def _is_parquet(path: Path) -> bool:
    return plain_name(path).lower().endswith(".parquet")


def _read_delimited(path: Path, names: Row, inventory: Inventory | None, unnamed: bool) -> list[Row]:
    table = open_delimited(path, names)
    header = set(names) <= set(table.names)
    if not header:
        _check_unnamed(table, names, unnamed)
    _check_twice(table.names if header else [], path)
    places = [table.names.index(name) for name in names] if header else list(range(len(names)))
    rows = []
    for line, cells in table.rows(skip=header):
        row = tuple([cells[i].strip() for i in places])
        if not all(row):
            empty = names[row.index("")]
            raise MixerError(
                f"data: line {line} of {path} must hold {' and '.join(names)}, none of them empty; {empty} is."
            )
        rows.append(row)
    if inventory is not None:
        if not header:
            inventory.tell("columns", f"{' and '.join(names)} by place, as line 1 names none ({table.preview_row(1)})")
        elif len(table.names) > len(names):
            others = first_names([repr(name) for name in table.names if name not in names])
            inventory.tell("columns", f"{', '.join(names)} (not {others})")
        for fact, said in table.facts.items():
            inventory.tell(fact, said)
    return rows


def _check_unnamed(table: Delimited, names: Row, unnamed: bool) -> None:
    """Refuse a table without the names, unless it may have none and holds these columns only."""
    known = ", ".join(map(repr, table.names))
    if not unnamed:
        missing = [name for name in names if name not in table.names]
        raise MixerError(f"data: {table.path} has no column {missing[0]!r} in line 1, but {known}.")
    likely = all(name.lower() in NAMES or CODE.fullmatch(name) or not name for name in table.names)
    if len(table.names) != len(names) or likely:
        raise MixerError(
            f"data: line 1 of {table.path} holds {known}, not {' and '.join(map(repr, names))}; name the columns to "
            + f"read (--data.languages), or give {len(names)} columns without a header."
        )


def _check_twice(names: list[str], path: Path) -> None:
    twice = [name for i, name in enumerate(names) if name and name in names[:i]]
    if twice:
        raise MixerError(f"data: {path} has two columns with the name {twice[0]!r}; rename one of them.")


class _Twice(Exception):
    """An object of JSON names something twice."""


def _json_object(pairs: list[tuple[str, object]]) -> Record:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for i, name in enumerate(names) if name in names[:i]))
    return found


def _json_objects(path: Path, names: Row) -> Iterator[tuple[int, Record]]:
    """Yield line and content of each object: those of lines, or of an array in a .json file, counted in its place."""
    wanted = f"an object with {' and '.join(names)}" if names else "an object"
    if plain_name(path).lower().endswith(".json"):
        whole = read_text(path)
        if whole.lstrip().startswith("["):
            yield from enumerate(_json_array(path, whole), 1)
            return
        wanted = f"{wanted}, or an array the whole file"
    i = 0
    for i, line in enumerate(filled_lines(path), 1):
        try:
            row: Any = json.loads(line, object_pairs_hook=_json_object)
        except _Twice as why:
            raise MixerError(f"data: line {i} of {path} names {str(why)!r} twice.") from None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise MixerError(f"data: line {i} of {path} must hold {wanted}; got {line.strip()[:80]!r}.")
        yield i, row
    if not i:
        raise MixerError(f"data: {path} is empty.")


def _json_array(path: Path, whole: str) -> list[Record]:
    try:
        found: Any = json.loads(whole, object_pairs_hook=_json_object)
    except _Twice as why:
        raise MixerError(f"data: an object of {path} names {str(why)!r} twice.") from None
    except (ValueError, RecursionError) as why:
        raise MixerError(f"data: {path} is not readable JSON ({why}).") from None
    for i, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise MixerError(f"data: entry {i} of {path} must be an object; got {json.dumps(row)[:80]}.")
    return found


def _json_cell(row: Record, name: str, names: Row, i: int, path: Path) -> str:
    where = f"data: line {i} of {path}" if not plain_name(path).endswith(".json") else f"data: entry {i} of {path}"
    if name not in row:
        has = first_names([repr(known) for known in row], 8) or "none"
        raise MixerError(f"{where} must hold an object with {' and '.join(names)}; it has no {name!r}, but {has}.")
    return text_of(row[name], f"{where}: {name!r}")


def text_of(value: object, where: str) -> str:
    """Return a text or a whole number as text that can be stored."""
    if not isinstance(value, str | int):
        raise MixerError(f"{where} must be a text, got {json.dumps(value, default=str)[:80]}.")
    text = str(value).strip()
    if not text:
        raise MixerError(f"{where} must hold a text, but is empty: none of them may be.")
    try:
        text.encode()
    except UnicodeEncodeError as why:
        raise MixerError(
            f"{where} holds {ascii(text[why.start])[1:-1]}, half of a character that UTF-16 writes in two; write the "
            + "text anew from its source."
        ) from None
    if "\0" in text:
        raise MixerError(f"{where} holds a NUL, as no text does.")
    return text


def _parquet(path: Path) -> ParquetFile:
    check_regular("data", path)
    try:
        import pyarrow.parquet
    except ImportError as why:
        raise MixerError(
            f"data: {path} needs the extra 'tables' ({why}): pip install 'tokenmix[tables]', or write it as .jsonl."
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as why:
        raise MixerError(f"data: {path} is not a readable Parquet file ({' '.join(str(why).split())[:200]}).") from None


def _read_parquet(path: Path, names: Row) -> list[Row]:
    file = _parquet(path)
    known = list(file.schema_arrow.names)
    missing = [name for name in names if name not in known]
    if missing:
        raise MixerError(f"data: {path} has no column {missing[0]!r}, but {first_names(map(repr, known), 8)}.")
    _check_twice(known, path)
    rows: list[Row] = []
    try:
        for batch in file.iter_batches(columns=list(names)):
            columns = [batch.column(name).to_pylist() for name in names]
            for cells in zip(*columns, strict=True):
                where = f"data: row {len(rows) + 1} of {path}"
                rows.append(tuple(text_of(v, f"{where}: {n!r}") for n, v in zip(names, cells, strict=True)))
    except OSError as why:
        raise MixerError(f"data: {path} is damaged ({' '.join(str(why).split())[:200]}).") from None
    return rows
