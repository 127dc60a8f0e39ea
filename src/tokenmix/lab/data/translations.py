"""Parallel text: pairs of a source and a target, from files or made here, in three splits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ...errors import MixerError
from .dialogues import PARTS, is_dialogues, read_dialogues
from .docstrings import docstring_pairs
from .grammar import sentence_pairs
from .inventory import Inventory
from .lines import read_lines
from .packed import plain_name
from .rows import Rows, read_split_tables, split_groups, tell_splits
from .split_names import SPLIT_NAMES
from .tables import KINDS, Row, is_table, read_columns
from .text_folders import leave_rest

SIDES = ("source", "target")
START = re.compile(r"(?:train|validation|valid|val|dev|test)[-_.]?", re.IGNORECASE)
MADE: dict[str, Callable[[], list[tuple[str, str]]]] = {"grammar": sentence_pairs, "docstrings": docstring_pairs}
PARALLEL_SETS = {
    "grammar": "English and Spanish sentences of a small grammar of our own",
    "docstrings": "functions of the Python standard library on this machine, and their docstrings",
}
"""Sets that need no file."""


@dataclass(frozen=True)
class ParallelText(Rows):
    """Pairs of source and target.

    Args:
        name: of the set, for reports.
        splits: pairs of train, valid and test.
        dialogue: whether sources are the turns of a dialogue, of which old ones may be left out (``fit_parts``).
    """

    dialogue: bool = False

    def texts(self, split: str) -> Iterable[str]:
        """Return what a tokenizer is trained on: all texts of a split, but each turn of a dialogue once."""
        if self.dialogue:
            return dict.fromkeys(part for pair in self.split(split) for text in pair for part in PARTS.split(text))
        return (text for pair in self.split(split) for text in pair)


def open_parallel(
    source: str,
    *,
    target: str | None = None,
    languages: tuple[str, ...] | None = None,
    version: str | None = None,
    split: tuple[float, ...] | None = None,
) -> ParallelText:
    """Open parallel text.

    Args:
        source: a name in ``PARALLEL_SETS``; a folder with files such as train.en, train.de, val.en, val.de, test.en and
            test.de, also packed, or with a table or a file of dialogues for each split; a table (.tsv, .csv, .jsonl,
            .json or .parquet) with the source and the target of each pair; a file of dialogues
            (``read_dialogues``), which is known by its first line; or, with ``target``, a file with one source per
            line.
        target: file with one target per line, in the order of the sources.
        languages: endings of the files of a folder, or names of the columns of a table: source, then target. None:
            "source" and "target" in a table, or its only two columns where it has no header, and the only two
            endings in a folder.
        version: what follows the split in the names of a folder's tables or dialogues, such as "self_original" of
            train_self_original.txt; None: there is one file for each split.
        split: proportions of train, validation and test for pairs that are not split yet; None: 90/5/5. Pairs are
            assigned by the hash of their source, and dialogues as a whole by that of their lines, so that the splits do
            not depend on the order of a file.

    Raises:
        MixerError: for files that are missing, empty, of unequal length or not UTF-8.
    """
    if languages is not None and (len(languages) != 2 or len(set(languages)) < 2):
        raise MixerError(f"data.languages must be two names that differ, source and target, got {list(languages)}.")
    if source in MADE and target is None:
        return _split_by_source(source, list(MADE[source]()), split)
    path = Path(source).expanduser()
    if not path.exists():
        raise MixerError(
            f"data: there is no {source!r}; give a folder or file of parallel text, or one of "
            + f"{', '.join(PARALLEL_SETS)}."
        )
    found = Inventory(str(path))
    if target is not None:
        return _split_by_source(path.name, _zip_lines(path, Path(target).expanduser(), found), split, found)
    if path.is_dir():
        return _folder(path, languages, version)
    if is_table(path):
        return _split_by_source(
            path.name, read_columns(path, languages or SIDES, found, unnamed=languages is None), split, found
        )
    if is_dialogues(path):
        dialogues = read_dialogues(path)
        found.count("files")
        found.count("dialogues", len(dialogues))
        groups: list[tuple[str, list[Row]]] = [("\n".join(lines), list(pairs)) for lines, pairs in dialogues]
        splits = split_groups(path.name, groups, split, "dialogues")
        tell_splits(found, splits)
        return ParallelText(path.name, splits, found, dialogue=True)
    raise MixerError(
        f"data: {source} holds one text per line; give the other side too (data.target), a table ({KINDS}), or "
        + "dialogues, whose lines are numbered from 1."
    )


def _split_by_source(
    name: str, pairs: list[Row], split: tuple[float, ...] | None, inventory: Inventory | None = None
) -> ParallelText:
    """Split pairs by their source."""
    splits = split_groups(name, ((pair[0], [pair]) for pair in pairs), split, "pairs")
    if inventory is not None:
        tell_splits(inventory, splits)
    return ParallelText(name, splits, inventory)


def _zip_lines(source: Path, target: Path, inventory: Inventory) -> list[Row]:
    left, right = read_lines(source), read_lines(target)
    if len(left) != len(right):
        raise MixerError(
            f"data: {source} and {target} must have as many lines, got {len(left):,} and {len(right):,}; line n of one "
            + "must translate line n of the other."
        )
    inventory.count("files", 2)
    inventory.count("rows", len(left))
    return list(zip(left, right, strict=True))


def _folder(folder: Path, languages: tuple[str, ...] | None, version: str | None) -> ParallelText:
    """Open a folder: two files of lines for each split where there are such, else a table or a file of dialogues."""
    endings, found = _endings(folder), Inventory(str(folder))
    by_line = len(endings) == 2 if languages is None else set(languages) <= set(endings)
    if not by_line and (whole := _two_sided_files(folder, version)):
        return _whole_splits(folder, whole, languages, version, found)
    if languages is None and not by_line:
        what = f"files for {', '.join(endings)}" if endings else "no train files"
        raise MixerError(
            f'data: {folder} has {what}; say which is source and which target: --data.languages \'["en", "de"]\'.'
        )
    wanted = languages or endings
    files = {name: _pair_of_files(folder, name, wanted) for name in SPLIT_NAMES}
    splits = {name: _zip_lines(*pair, found) for name, pair in files.items()}
    tell_splits(found, splits)
    leave_rest(found, folder, [file for pair in files.values() for file in pair])
    return ParallelText(f"{folder.resolve().name}, {'-'.join(wanted)}", splits, found)


def _whole_splits(
    folder: Path, whole: dict[str, Path], languages: tuple[str, ...] | None, version: str | None, found: Inventory
) -> ParallelText:
    """Open a table or a file of dialogues for each split."""
    name = folder.resolve().name + (f", {version}" if version else "")
    leave_rest(found, folder, whole.values())
    if is_table(whole["train"]):
        rows = read_split_tables(whole, languages or SIDES, found, unnamed=languages is None)
        return ParallelText(name, rows, found)
    told: dict[str, list[Row]] = {}
    for split, file in whole.items():
        dialogues = read_dialogues(file)
        found.count("files")
        found.count("dialogues", len(dialogues))
        told[split] = [pair for each in dialogues for pair in each.pairs]
    tell_splits(found, told)
    return ParallelText(name, told, found, dialogue=True)


def _two_sided_files(folder: Path, version: str | None) -> dict[str, Path]:
    """Return the file of each split of a folder whose files hold both sides; empty if its train files do not."""
    found = {}
    for split, starts in SPLIT_NAMES.items():
        named = {
            START.sub("", plain_name(file).rpartition(".")[0], count=1): file
            for file in sorted(folder.iterdir())
            if file.name.lower().startswith(starts) and file.is_file() and (is_table(file) or is_dialogues(file))
        }
        if split == "train" and not named:
            return {}
        if version is None and len(named) > 1:
            raise MixerError(
                f"data: {folder} has several {split} files: {', '.join(sorted(file.name for file in named.values()))}; "
                + f"say which with data.version, one of {', '.join(map(repr, sorted(named)))}."
            )
        chosen = named.get(version) if version is not None else next(iter(named.values()), None)
        if chosen is None:
            which = "" if version is None else f" of version {version!r}"
            there = f"; there is {', '.join(map(repr, sorted(named)))}" if version is not None and named else ""
            raise MixerError(
                f"data: {folder} has no {' or '.join(starts)} file{which}{there}; it needs train, valid and test."
            )
        found[split] = chosen
    return found


def _pair_of_files(folder: Path, split: str, endings: tuple[str, ...]) -> tuple[Path, Path]:
    """Return the first two files of a split whose names differ in the language only, by the order of its words."""
    starts = SPLIT_NAMES[split]
    sides = [_by_stem(folder, starts, ending) for ending in endings]
    for ending, side in zip(endings, sides, strict=True):
        if not side:
            raise MixerError(
                f"data: {folder} has no {' or '.join(starts)} file that ends in .{ending} or .{ending}.gz; it needs "
                + f"train, valid and test for {' and '.join(endings)}."
            )
    for stem, source in sides[0].items():
        if stem in sides[1]:
            return source, sides[1][stem]
    raise MixerError(
        f"data: {folder} has {next(iter(sides[0].values())).name} and {next(iter(sides[1].values())).name}, but no two "
        + f"{split} files whose names differ in {' and '.join(endings)} only."
    )


def _by_stem(folder: Path, starts: tuple[str, ...], ending: str) -> dict[str, Path]:
    """Return the files of a split and a language by what stands before the language, in the order of ``starts``."""
    found: dict[str, Path] = {}
    for start in starts:
        for file in sorted(folder.iterdir()):
            plain = plain_name(file)
            if plain.lower().startswith(start) and plain.endswith(f".{ending}") and file.is_file():
                found.setdefault(plain.removesuffix(f".{ending}"), file)
    return found


def _endings(folder: Path) -> tuple[str, ...]:
    """Return the endings of a folder's train files."""
    trained = [file for file in folder.iterdir() if file.name.lower().startswith("train") and file.is_file()]
    found = {plain_name(file).rpartition(".")[2] for file in trained}
    return tuple(sorted(found))
