"""Rows of texts in three splits, read from tables or made here: documents, labelled texts, pairs of texts."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import MixerError
from .corpus import SPLITS, check_split, cut
from .lines import is_table, read_columns
from .sampler import mix64

Row = tuple[str, ...]
SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
"""The words in a file's name that say which split it holds."""


@dataclass(frozen=True)
class Rows:
    """Rows of texts.

    Args:
        name: of the set, for reports.
        splits: rows of train, valid and test.
    """

    name: str
    splits: dict[str, list[Row]]

    def split(self, name: str) -> list[Row]:
        """Return the rows of a split."""
        check_split(self.name, name, self.splits)
        return self.splits[name]

    @property
    def sha256(self) -> str:
        """Return the sha256 of all rows in their order."""
        digest = hashlib.sha256()
        for name in SPLITS:
            for row in self.splits[name]:
                digest.update("\0".join((name, *row, "")).encode())
        return digest.hexdigest()


def split_rows(name: str, rows: list[Row], split: tuple[float, ...] | None) -> Rows:
    """Split rows by their first text, so that a text is in one split only; see ``split_groups``."""
    return Rows(name, split_groups(name, [(row[0], [row]) for row in rows], split))


def split_groups(
    name: str, groups: list[tuple[str, list[Row]]], split: tuple[float, ...] | None, what: str = "rows"
) -> dict[str, list[Row]]:
    """Split groups of rows by the hash of their keys, so that a key is in one split only, wherever it stands.

    Args:
        name: of the set, for errors.
        groups: key and rows of each group.
        split: proportions of train, validation and test; None: 90/5/5.
        what: the groups are, for errors.

    Raises:
        MixerError: if a split would be empty.
    """
    parts = (90.0, 5.0, 5.0) if split is None else split
    if len(parts) != 3:
        raise MixerError(f"data.split must be three proportions like [90, 5, 5], got {list(parts)}.")
    train, valid, _ = cut(1 << 32, (parts[0], parts[1], parts[2]))
    splits: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for key, rows in groups:
        at = mix64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")) >> 32
        splits["train" if at < train else "valid" if at < valid else "test"] += rows
    empty = [split for split, found in splits.items() if not found]
    if empty:
        raise MixerError(
            f"data: {name} has {len(groups)} {what}, which leave none for {' and '.join(empty)}; give more."
        )
    return splits


def read_tables(path: Path, columns: tuple[str, ...], split: tuple[float, ...] | None) -> Rows:
    """Read named columns of one table, which is then split, or of a folder with a table for each split.

    Args:
        path: .tsv or .jsonl file, also .gz or .xz, or a folder of which each split's table has its name: train;
            valid, validation, val or dev; test (such as sst2_dev.tsv).

    Raises:
        MixerError: for a folder that lacks a split, and for what ``read_columns`` refuses.
    """
    if not path.is_dir():
        return split_rows(path.name, list(read_columns(path, columns)), split)
    return Rows(path.resolve().name, {name: list(read_columns(split_file(path, name), columns)) for name in SPLITS})


def split_file(folder: Path, name: str) -> Path:
    """Return the table of a folder that holds a split.

    Raises:
        MixerError: if there is none, or more than one.
    """
    words = SPLIT_NAMES[name]
    named = re.compile(rf"(^|[._-])({'|'.join(words)})([._-]|$)")
    found = sorted(file for file in folder.iterdir() if is_table(file) and named.search(file.name))
    if len(found) != 1:
        got = "has none" if not found else f"has {' and '.join(file.name for file in found)}"
        raise MixerError(
            f"data: {folder} must have one table (.tsv or .jsonl) whose name says {' or '.join(words)}, but {got}."
        )
    return found[0]
