"""Labelled texts for classifiers: one text or a pair of texts in each row, and the label of the row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ...errors import MixerError
from ...system.text import whole_number
from .corpus import SPLITS
from .docstrings import docstring_pairs
from .inventory import LONGEST, first_names
from .long_range import LONG_SETS, draw_rows
from .rows import Rows, read_tables, split_file, split_rows
from .sampler import mix64
from .tables import KINDS, Row, column_names, is_table

LABELLED_SETS = {
    "docstring_match": "whether a docstring belongs to a function of the Python standard library on this machine",
    **{name: made.about for name, made in LONG_SETS.items()},
}
"""Sets that need no file."""
ROOM = 123
TEXTS = (
    ("sentence",),
    ("text",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
"""Columns that are taken for the texts of a table when none are named, as those of GLUE's and IMDB's."""


def open_labelled(
    source: str,
    *,
    columns: tuple[str, ...] | None = None,
    label: str = "label",
    split: tuple[float, ...] | None = None,
    room: int = ROOM,
) -> tuple[Rows, list[str]]:
    """Open labelled texts; each row of the result is one text or two, and then the label.

    Args:
        source: a name in ``LABELLED_SETS``; a table with named columns (.tsv, .csv, .jsonl, .json or .parquet),
            which is then split; or a folder with a table for each split, such as SST-2's. Files may be packed.
        columns: one column of texts, or two for pairs; None: the first of ``TEXTS`` that a table has.
        label: column of the labels.
        split: proportions of train, validation and test for rows that are not split yet; None: 90/5/5.
        room: most characters of a row of a set that is drawn (``long_range.LONG_SETS``), 123 by default.

    Returns:
        The rows, and the labels of the training split in their order: by number if all are numbers, else by name.

    Raises:
        MixerError: for files that are missing, empty or not UTF-8, for columns that are not there, and for a label that
            no row of training has.
    """
    if columns is not None and len(columns) not in (1, 2):
        raise MixerError(f"data.columns must name one column of texts, or two for pairs, got {list(columns)}.")
    if source in LONG_SETS:
        rows = draw_rows(source, room)
    elif source in LABELLED_SETS:
        rows = _match_docstrings(split_rows(source, list(docstring_pairs()), split))
    else:
        path = Path(source).expanduser()
        if not path.exists():
            raise MixerError(
                f"data: there is no {source!r}; give a table of labelled texts, a folder with one for each split, or "
                + f"one of {', '.join(LABELLED_SETS)}."
            )
        if not path.is_dir() and not is_table(path):
            raise MixerError(f"data: {path} is no table by its name; labelled texts are read from {KINDS}.")
        table = split_file(path, "train") if path.is_dir() else path
        rows = read_tables(path, (*_columns(table, columns, label), label), split)
    labels = _labels(rows)
    if rows.inventory is not None:
        counts = Counter(row[-1] for row in rows.split("train"))
        rows.inventory.tell_counts("labels in training", {label: counts[label] for label in labels})
    return rows, labels


def _columns(table: Path, given: tuple[str, ...] | None, label: str) -> tuple[str, ...]:
    names = column_names(table)
    wanted = (*(given or ()), label)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise MixerError(
            f"data: {table} has no column {missing[0]!r}, but {', '.join(names)}; name its texts with --data.columns "
            + "and its labels with --data.label."
        )
    if len(set(wanted)) < len(wanted):
        raise MixerError(
            f"data: texts and label are columns of their own, got data.columns={list(given or ())} and "
            + f"data.label={label!r}; the model would read what it is to tell."
        )
    found = [given] if given else [texts for texts in TEXTS if set(texts) <= set(names)]
    if not found:
        raise MixerError(
            f"data: {table} has the columns {', '.join(names)}; say which hold the texts: --data.columns "
            + "'[\"text\"]'."
        )
    return found[0]


def _labels(rows: Rows) -> list[str]:
    known = {row[-1] for row in rows.split("train")}
    if len(known) < 2:
        raise MixerError(
            f"data: all rows of {rows.name} for training have the label {min(known)!r}; give at least two."
        )
    for name in SPLITS:
        for i, row in enumerate(rows.split(name), 1):
            if row[-1] not in known:
                raise MixerError(
                    f"data: row {i} of {rows.name}'s split {name} has the label {row[-1][:LONGEST]!r}, which no row of "
                    + f"training has; those are {first_names(sorted(each[:LONGEST] for each in known), 20)}."
                )
    numbers = {label: whole_number(label) for label in known}
    of_numbers = None not in numbers.values()
    return sorted(known, key=lambda label: ((numbers[label] or 0) if of_numbers else 0, label))


def _match_docstrings(pairs: Rows) -> Rows:
    """Return functions beside their own docstring ("same"), or beside that of another one of their split ("other").

    Another docstring comes from the same split, or it would tell by having been seen in training.
    """
    splits: dict[str, list[Row]] = {}
    for name in SPLITS:
        found = pairs.split(name)
        splits[name] = []
        for i, (body, said) in enumerate(found):
            other = found[(i + 1 + mix64(i) % max(len(found) - 1, 1)) % len(found)][1]
            splits[name].append(
                (body, said, "same") if mix64(~i & 0xFFFF) & 1 or other == said else (body, other, "other")
            )
    return Rows(pairs.name, splits)
