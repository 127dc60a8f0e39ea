"""Folders named after classes and splits: which file belongs to which, told by the names of the folders alone."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import MixerError
from .corpus import SPLITS
from .inventory import Inventory, first_names

LAYOUTS = ("classes", "splits")
SPELLINGS = {
    "train": ("train", "training", "trn"),
    "valid": ("val", "valid", "validate", "validation", "dev", "devel", "development"),
    "test": ("test", "tests", "testing", "tst"),
}
ADDED = r"([-_ .]?(\d{1,4}|set|data|images|imgs|split|fold|folder))*"  # train2017, test_set, val-images
SPLIT_NAME = {part: re.compile(f"({'|'.join(names)}){ADDED}", re.I) for part, names in SPELLINGS.items()}


def split_of(folder: str) -> str | None:
    """Return the split that a folder's name means in any common spelling, or None."""
    return next((part for part, name in SPLIT_NAME.items() if name.fullmatch(folder)), None)


def splits_of(folders: Collection[str]) -> dict[str, str]:
    """Return the splits that the names of folders mean: by themselves, or all of them by what they do not share.

    The latter are images_train and images_val, or train_v2 and test_v2.
    """
    splits = {folder: part for folder in folders if (part := split_of(folder))}
    if splits or len(folders) < 2:
        return splits
    before = re.fullmatch(r"(.*[-_ .])?.*", os.path.commonprefix(list(folders)), re.S)
    after = re.fullmatch(r"(.*[-_ .])?.*", os.path.commonprefix([folder[::-1] for folder in folders]), re.S)
    start, end = (len(found[1] or "") if found else 0 for found in (before, after))
    rest = {folder: split_of(folder[start : len(folder) - end]) for folder in folders}
    return {folder: part for folder, part in rest.items() if part} if all(rest.values()) else {}


@dataclass(frozen=True)
class Arranged:
    """Files by split and class.

    Args:
        classes: names of the classes, sorted.
        parts: names of files and the numbers of their classes, by "all", or by "train" and the other splits there are.
    """

    classes: tuple[str, ...]
    parts: dict[str, list[tuple[str, int]]]


@dataclass(frozen=True)
class _Set:
    """What is said in errors: who asks, what is read, the kind of files, and the layout expected."""

    who: str
    root: Path
    unit: str
    ending: str

    def error(self, words: str) -> MixerError:
        return MixerError(f"{self.who}: {words}")

    @property
    def hint(self) -> str:
        return (
            f"expected CLASS/*{self.ending}, or train/CLASS/*{self.ending} beside val/CLASS/*{self.ending} and "
            + f"test/CLASS/*{self.ending}"
        )


def arrange(
    names: Sequence[str],
    folders: Collection[str],
    *,
    root: Path,
    layout: str | None,
    read: Inventory,
    who: str = "images",
    unit: str = "images",
    ending: str = ".jpg",
) -> Arranged:
    """Tell classes and splits of files from the folders they lie in.

    Three arrangements are known: CLASS/*, SPLIT/CLASS/* and CLASS/SPLIT/*, with further folders inside of classes. A
    folder whose name is that of a split in any spelling is a split, if all folders beside it are; otherwise it is asked
    what is meant.

    Args:
        names: files, relative to ``root``, with "/".
        folders: all folders, relative to ``root``, also empty ones.
        root: folder or archive, for errors.
        layout: "classes": the first folder is the class, whatever its name; "splits": the first folder is the split,
            and others are left out; None: told by the names.
        read: what was found and left out is added to it.
        who, unit, ending: for errors: who asks, and what the files are.

    Raises:
        MixerError: the folders can be understood in two ways, or classes or training files are missing.
    """
    asked = _Set(who, root, unit, ending)
    if layout not in (None, *LAYOUTS):
        raise asked.error(f"layout must be {' or '.join(map(repr, LAYOUTS))}, or left out, got {layout!r}.")
    part_of, level = _placement(names, layout, asked)
    by_part: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        parts = name.split("/")
        part = "all" if part_of is None else part_of.get(parts[level]) if len(parts) > level + 1 else None
        if part is None:
            read.leave("outside of the splits", name)
            continue
        rest = parts if part_of is None else parts[:level] + parts[level + 1 :]
        by_part.setdefault(part, []).append((name, rest[0] if len(rest) > 1 else ""))
    _leave_unlabelled_tests(by_part, read)
    found = _number_classes(by_part, asked)
    _check_empty(set(folders) - {name.rpartition("/")[0] for name in names}, found, part_of, level, asked, read)
    _report_missing(found, level if part_of is not None else -1, read)
    _tell_links(found, root, read)
    return found


def _placement(names: Sequence[str], layout: str | None, asked: _Set) -> tuple[dict[str, str] | None, int]:
    """Return the split that each folder name means and at which level these stand; None: there are no splits."""
    tops = sorted({name.split("/")[0] for name in names if "/" in name})
    splits = splits_of(tops)
    if layout == "classes":
        return None, 0
    if layout == "splits":
        if not splits:
            raise asked.error(f"{asked.root} has no folder named as a split, but layout='splits'; {asked.hint}.")
        return _each_once(splits, asked), 0
    if not splits:
        return _splits_in_classes(names, asked)
    other = [top for top in tops if top not in splits]
    looks = f"the folder {asked.root / min(splits)} is named as a split"
    if other:
        raise asked.error(
            f"{looks}, but {first_names(other)} beside it is not and holds {asked.unit} as well; say "
            + "layout='classes' (--data.layout classes) if these are classes, or layout='splits' to leave "
            + f"{first_names(other)} out."
        )
    if not any(name.count("/") > 1 for name in names):
        raise asked.error(
            f"{looks}, but it has no class folders; {asked.hint}; say layout='classes' (--data.layout classes) if "
            + f"{first_names(splits)} is a class."
        )
    return _each_once(splits, asked), 0


def _splits_in_classes(names: Sequence[str], asked: _Set) -> tuple[dict[str, str] | None, int]:
    """Look for CLASS/SPLIT/*: in all classes, or it is asked what is meant."""
    inner = {name.split("/")[1] if name.count("/") > 1 else "" for name in names if "/" in name}
    splits = splits_of(inner)
    if not splits:
        return None, 0
    if len(splits) < len(inner):
        example = next(n for n in names if "/" in n and (n.count("/") < 2 or n.split("/")[1] not in splits))
        raise asked.error(
            f"{asked.root} has folders named as a split in class folders ({min(splits)}), but {example} is in none; "
            + "say layout='classes' (--data.layout classes) if these are no splits."
        )
    return _each_once(splits, asked), 1


def _each_once(splits: dict[str, str], asked: _Set) -> dict[str, str]:
    for part in SPLITS:
        same = sorted(folder for folder, meant in splits.items() if meant == part)
        if len(same) > 1:
            raise asked.error(
                f"{asked.root} has {' and '.join(same)}, which are all the split {part!r}; keep one, or say "
                + "layout='classes' (--data.layout classes) if these are classes."
            )
    if "train" not in splits.values():
        raise asked.error(
            f"{asked.root} has no training {asked.unit}, only {first_names(sorted(splits))}; add train/, or give one "
            + "of these folders itself, which is then divided."
        )
    return splits


def _leave_unlabelled_tests(by_part: dict[str, list[tuple[str, str]]], read: Inventory) -> None:
    """Leave test files without any class folder out, or all in one that is no class, as those of competitions are."""
    tests = by_part.get("test", [])
    labels = {label for _, label in tests}
    known = {label for _, label in by_part.get("train", [])}
    if labels == {""} or (len(labels) == 1 and not labels & known):
        read.leave("for the test without a class", *(name for name, _ in tests))
        del by_part["test"]


def _number_classes(by_part: dict[str, list[tuple[str, str]]], asked: _Set) -> Arranged:
    flat = [name for files in by_part.values() for name, label in files if not label]
    if flat:
        more = f" (nor are {len(flat) - 1:,} more)" if len(flat) > 1 else ""
        raise asked.error(f"{asked.root / flat[0]} is not in a class folder{more}; {asked.hint}.")
    classes = tuple(sorted({label for _, label in by_part.get("train", by_part.get("all", []))}))
    if len(classes) < 2:
        only = f" ({classes[0]})" if classes else ""
        raise asked.error(
            f"{asked.root} has only one class{only}; a data set needs at least two class folders: {asked.hint}."
        )
    number = {label: i for i, label in enumerate(classes)}
    for files in by_part.values():
        for name, label in files:
            if label not in number:
                raise asked.error(
                    f"{asked.root / name} belongs to a class that is not among the {len(classes)} in train/."
                )
    parts = {part: [(name, number[label]) for name, label in files] for part, files in by_part.items()}
    return Arranged(classes, {"all": parts["train"]} if set(parts) == {"train"} else parts)


def _check_empty(
    folders: Collection[str],
    found: Arranged,
    splits: dict[str, str] | None,
    level: int,
    asked: _Set,
    read: Inventory,
) -> None:
    """Refuse folders of classes without a file to learn from; tell of those without one to score."""
    for folder in sorted(folders):
        parts = folder.split("/")
        if splits is None or level == 1:
            label, part = parts[0] if len(parts) == 1 else "", "train"
        else:
            label, part = parts[1] if len(parts) == 2 else "", splits.get(parts[0], "")
        if not label or not part or label in found.classes:
            continue
        if part == "train":
            raise asked.error(f"the class folder {asked.root / folder} contains no {asked.unit}; remove it or fill it.")
        read.leave("empty class folders", folder)


def _report_missing(found: Arranged, level: int, read: Inventory) -> None:
    """Say which classes are missing from a split, and how many files lie deeper than their class folder."""
    for part in ("valid", "test"):
        if part in found.parts:
            there = {label for _, label in found.parts[part]}
            missing = [name for i, name in enumerate(found.classes) if i not in there]
            if missing:
                read.tell(f"classes without any file for {part}", first_names(missing))
    depth = 1 if level < 0 else 2
    nested = sum(name.count("/") > depth for files in found.parts.values() for name, _ in files)
    if nested:
        read.count("nested files", nested)


def _tell_links(found: Arranged, root: Path, read: Inventory) -> None:
    """Say how many files are read again under another name, as links let them.

    Such a file has two labels, or is trained on and scored, or counts twice.
    """
    again: dict[str, list[str]] = {}
    firsts: dict[int, tuple[str, int, str]] = {}
    shared = _shared_files([name for files in found.parts.values() for name, _ in files], root)
    for part, files in found.parts.items() if shared else ():
        for name, label in files:
            key = shared.get(name)
            if key is None:
                continue
            first_part, first_label, first = firsts.setdefault(key, (part, label, name))
            if first != name:
                where = "two classes" if first_label != label else "two splits" if first_part != part else "one class"
                again.setdefault(where, []).append(f"{name} is {first}")
    for where, pairs in again.items():
        read.tell(f"read twice through links, in {where}", f"{len(pairs):,} ({first_names(pairs)})")


def _shared_files(names: Sequence[str], root: Path) -> dict[str, int]:
    """Return the files of a folder that are one file with another of them, by a link of either kind, and its number."""
    if not root.is_dir():  # an archive has no links
        return {}
    seen: set[int] = set()
    shared: set[int] = set()
    numbers = [_number_of(os.path.join(root, name)) for name in names]
    for number in numbers:
        (shared if number in seen else seen).add(number)
    return {name: n for name, n in zip(names, numbers, strict=True) if n and n in shared}


def _number_of(path: str) -> int:
    """Return the number that a file system gives a file, under all of its names; 0 where it gives none."""
    try:
        at = os.stat(path)
    except OSError:  # said when it is read
        return 0
    return at.st_dev << 64 | at.st_ino if at.st_ino else 0


def tell_classes(read: Inventory, classes: Sequence[str], labels: Sequence[int]) -> None:
    """Record how many files each class has."""
    counts = Counter(labels)
    read.tell_counts("classes", {name: counts[i] for i, name in enumerate(classes)})
