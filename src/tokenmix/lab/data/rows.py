"""Rows of texts in three splits, read from tables or made here: documents, labelled texts, pairs of texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ...errors import MixerError
from .corpus import SPLITS, check_split, cut
from .inventory import Inventory, unit_of
from .sampler import mix64
from .split_names import SPLIT_NAMES, split_word
from .tables import KINDS, Row, has_header, is_table, read_columns
from .text_folders import leave_rest

FEW = 1000  # different texts that are counted for an error


@dataclass(frozen=True)
class Rows:
    """Rows of texts.

    Args:
        name: of the set, for reports.
        splits: rows of train, valid and test.
        inventory: what was found and what was left out; None: the rows are made here.
    """

    name: str
    splits: dict[str, list[Row]]
    inventory: Inventory | None = field(default=None, compare=False)

    def split(self, name: str) -> list[Row]:
        """Return the rows of a split."""
        check_split(self.name, name, self.splits)
        return self.splits[name]

    @cached_property
    def sha256(self) -> str:
        """Return the sha256 of all rows in their order."""
        digest = hashlib.sha256()
        for name in SPLITS:
            for row in self.splits[name]:
                digest.update("\0".join((name, *row, "")).encode())
        return digest.hexdigest()


def split_rows(name: str, rows: list[Row], split: tuple[float, ...] | None, inventory: Inventory | None = None) -> Rows:
    """Split rows by their first text, so that a text is in one split only; see ``split_groups``."""
    splits = split_groups(name, ((row[0], [row]) for row in rows), split)
    if inventory is not None:
        tell_splits(inventory, splits)
    return Rows(name, splits, inventory)


def split_groups(
    name: str, groups: Iterable[tuple[str, list[Row]]], split: tuple[float, ...] | None, what: str = "rows"
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
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    keys: set[str] = set()
    for key, rows in groups:
        if len(keys) < FEW:
            keys.add(key)
        at = mix64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")) >> 32
        chosen = "train" if at < train else "valid" if at < valid else "test"
        splits[chosen] += rows
        counts[chosen] += 1
    empty = [split for split, found in splits.items() if not found]
    if empty:
        n = sum(counts.values())
        differing = f" of {len(keys)} different first texts" if what != "dialogues" and len(keys) < min(n, FEW) else ""
        raise MixerError(
            f"data: {name} has {n:,} {unit_of(what, n)}{differing}, which leave none for {' and '.join(empty)}; give "
            + "more."
        )
    return splits


def read_tables(path: Path, columns: Row, split: tuple[float, ...] | None, *, unnamed: bool = False) -> Rows:
    """Read named columns of one table, which is then split, or of a folder with a table for each split.

    Args:
        path: table (``tables.KINDS``), also packed, or a folder of which each split's table has its name: train; valid,
            validation, val or dev; test (such as sst2_dev.tsv).
        unnamed: whether tables may lack a header; see ``read_columns``.

    Raises:
        MixerError: for a folder that lacks a split, and for what ``read_columns`` refuses.
    """
    inventory = Inventory(str(path))
    if not path.is_dir():
        return split_rows(path.name, read_columns(path, columns, inventory, unnamed=unnamed), split, inventory)
    files = {name: split_file(path, name) for name in SPLITS}
    leave_rest(inventory, path, files.values())
    return Rows(path.resolve().name, read_split_tables(files, columns, inventory, unnamed=unnamed), inventory)


def read_split_tables(
    files: dict[str, Path], columns: Row, inventory: Inventory, *, unnamed: bool = False
) -> dict[str, list[Row]]:
    """Read named columns of the table of each split, of which all have a header or none has."""
    if unnamed:
        named = {split: has_header(file, columns) for split, file in files.items()}
        for split, header in named.items():
            if header != named["train"]:
                has, lacks = (files[split], files["train"]) if header else (files["train"], files[split])
                raise MixerError(
                    f"data: line 1 of {has} names {' and '.join(columns)}, that of {lacks} does not; give it a header."
                )
    found = {name: read_columns(file, columns, inventory, unnamed=unnamed) for name, file in files.items()}
    tell_splits(inventory, found)
    return found


def tell_splits(inventory: Inventory, splits: dict[str, list[Row]]) -> None:
    """Record how many rows each split has."""
    inventory.tell_counts("splits", {name: len(splits[name]) for name in SPLITS})


def split_file(folder: Path, name: str) -> Path:
    """Return the table of a folder that holds a split.

    Raises:
        MixerError: if there is none, or more than one.
    """
    words, named = SPLIT_NAMES[name], split_word(name)
    found = sorted(
        file
        for file in folder.iterdir()
        if is_table(file) and named.search(file.name.lower()) and not file.name.startswith(".") and file.is_file()
    )
    if len(found) != 1:
        got = "has none" if not found else f"has {' and '.join(file.name for file in found)}"
        raise MixerError(
            f"data: {folder} must have one table ({KINDS}) whose name says {' or '.join(words)}, but {got}."
        )
    return found[0]
