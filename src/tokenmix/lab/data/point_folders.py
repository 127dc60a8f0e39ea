"""Folders of point clouds: ModelNet40 as meshes or points, and ShapeNet's parts as text."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from ...errors import MixerError
from .bounds import Bounds
from .class_folders import arrange
from .inventory import Inventory
from .point_files import SUFFIXES
from .sampler import mix64
from .trees import Tree, folder_tree

Item = tuple[Path, int]
"""The file of a cloud and the number of its class."""
Splits = dict[str, list[Item]]

SHAPENET_PARTS = {
    "Airplane": 4,
    "Bag": 2,
    "Cap": 2,
    "Car": 4,
    "Chair": 4,
    "Earphone": 3,
    "Guitar": 3,
    "Knife": 2,
    "Lamp": 4,
    "Laptop": 2,
    "Motorbike": 6,
    "Mug": 2,
    "Pistol": 3,
    "Rocket": 3,
    "Skateboard": 3,
    "Table": 3,
}
"""Parts of each category of ShapeNet-part (Yi et al. 2016), in the order of its 50 labels."""
CATEGORIES = "synsetoffset2category.txt"
LISTS = "train_test_split"


def class_folders(root: Path, valid: float, layout: str | None, read: Inventory) -> tuple[tuple[str, ...], Splits]:
    """Find the clouds of classes: in folders as those of ``arrange``, or by the lists of ModelNet40.

    CLASS/train/* and CLASS/test/*, train/CLASS/*, or CLASS/*, also with the lists NAME_train.txt and NAME_test.txt,
    whose lines are names of files without their ends (airplane_0001). What is missing of validation and test is held
    out of the clouds for training, a share ``valid`` each.

    Raises:
        MixerError: there is no such folder, it has no class, or a class is known to one split only.
    """
    tree = folder_tree(root, Bounds())
    clouds = _cloud_names(tree, read)
    listed = sorted(root.glob("*_train.txt"))
    if listed:
        names = tuple(sorted({n.split("/")[0] for n in clouds if "/" in n}))
        splits = _list_splits(root, names, listed[0])
        used = {file for items in splits.values() for file, _ in items}
        if unused := [n for n in clouds if root / n not in used]:
            read.leave("not in the lists", *unused)
    else:
        options = {"who": "data", "unit": "clouds", "ending": ".off"}
        found = arrange(clouds, tree.folders, root=root, layout=layout, read=read, **options)
        names = found.classes
        splits = {part: [(root / n, label) for n, label in files] for part, files in found.parts.items()}
    return names, with_held_out(splits, valid, root)


def _cloud_names(tree: Tree, read: Inventory) -> list[str]:
    """Return the files of clouds in a tree; what is left out is added to ``read``."""
    lists = re.compile(r"[^/]*_(train|test|shape_names)\.txt|[^/]*filelist\.txt", re.I)
    found: list[str] = []
    if tree.left["hidden"]:
        read.leave("hidden", *tree.left["hidden"])
    for name in tree.names:
        ending = os.path.splitext(name)[1].lower()
        if ending in SUFFIXES and not lists.fullmatch(name):
            found.append(name)
        elif not lists.fullmatch(name):
            read.leave(f"no clouds ({ending or 'no ending'})", name)
    if not found:
        raise MixerError(
            f"data: {tree.root} has no clouds ({', '.join(SUFFIXES)}); it must have a folder for each class of them."
        )
    read.count("files", len(tree.names))
    return found


def _list_splits(root: Path, names: tuple[str, ...], train: Path) -> Splits:
    splits: Splits = {"train": [], "test": []}
    for split, items in splits.items():
        file = train.with_name(train.name.replace("_train.txt", f"_{split}.txt"))
        if not file.is_file():
            raise MixerError(f"data: {root} has {train.name}, but no {file.name} beside it.")
        for line in _text(file).split():
            name = line.rpartition("_")[0]
            if name not in names:
                raise MixerError(
                    f"data: {file} lists {line!r}, but {root} has no class folder {name!r}; it has "
                    + f"{', '.join(names[:20])}."
                )
            items.append((_with_suffix(root / name / line), names.index(name)))
    known = {number for _, number in splits["train"]}
    for number, name in enumerate(names):
        if number not in known:
            raise MixerError(
                f"data: the folder {root / name} is no class that can be learned: {train.name} lists nothing of it; "
                + "move the folder away."
            )
    return splits


def _with_suffix(stem: Path) -> Path:
    found = [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]
    return next((file for file in found if file.is_file()), stem.with_name(f"{stem.name}.txt"))  # reading it names it


def shapenet_parts(root: Path) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...], Splits]:
    """Find the clouds of ShapeNet-part: a folder of text for each category, x y z nx ny nz label in each line.

    Categories and their order are those of ``synsetoffset2category.txt``, splits those of the lists in
    ``train_test_split``.

    Returns:
        The categories present, the labels of the parts of each, and the splits.

    Raises:
        MixerError: a file of the set is missing or broken, or a folder or a list names an unknown category.
    """
    table = [line.split() for line in _text(root / CATEGORIES).splitlines() if line.strip()]
    for row in table:
        if len(row) != 2 or row[0] not in SHAPENET_PARTS:
            raise MixerError(
                f"data: {root / CATEGORIES} names an unknown category {' '.join(row)!r}; known: "
                + f"{', '.join(SHAPENET_PARTS)}."
            )
    first, parts = 0, {}
    for name, n in SHAPENET_PARTS.items():
        parts[name] = tuple(range(first, first + n))
        first += n
    offsets = {row[1]: row[0] for row in table}
    names = tuple(sorted(offsets.values()))
    for folder in root.iterdir():
        if folder.is_dir() and folder.name != LISTS and folder.name not in offsets:
            raise MixerError(f"data: {root} has a folder of an unknown category, {folder.name}; see {CATEGORIES}.")
    splits: Splits = {}
    for split, stem in (("train", "train"), ("valid", "val"), ("test", "test")):
        file = root / LISTS / f"shuffled_{stem}_file_list.json"
        splits[split] = [_entry(root, file, each, offsets, names) for each in _json_list(file)]
    return names, tuple(parts[name] for name in names), splits


def _entry(root: Path, file: Path, entry: object, offsets: dict[str, str], names: tuple[str, ...]) -> Item:
    *_, offset, stem = ("", "", *str(entry).split("/"))
    if offset not in offsets:
        raise MixerError(f"data: {file} lists {entry!r}, of an unknown category {offset!r}; see {CATEGORIES}.")
    return root / offset / f"{stem}.txt", names.index(offsets[offset])


def _json_list(file: Path) -> list[object]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as why:
        raise MixerError(f"data: {file} is not a list of files in JSON ({why}).") from None
    if not isinstance(found, list) or not found:
        raise MixerError(f"data: {file} must be a list of names of files in JSON, and not empty.")
    return found


def with_held_out(splits: Splits, share: float, root: Path) -> Splits:
    """Hold clouds out of those for training for each split that is missing: no two splits share one."""
    train = splits.get("train") or splits.get("all") or []
    found = {part: items for part, items in splits.items() if part not in ("train", "all") and items}
    for part in ("valid", "test"):
        if part not in found:
            train, found[part] = _hold_out(train, share, root)
    return {"train": train, "valid": found["valid"], "test": found["test"]}


def _hold_out(train: list[Item], share: float, root: Path) -> tuple[list[Item], list[Item]]:
    """Split a share of the clouds off, the same ones each time, evenly over the classes."""
    if len(train) < 2:
        raise MixerError(f"data: {root} has {len(train)} clouds for training to hold some out of; give at least 2.")
    n = min(max(round(share * len(train)), 1), len(train) - 1)
    order = sorted(range(len(train)), key=lambda i: (mix64(i), i))
    order.sort(key=lambda i: train[i][1])  # by class, and at random within each
    chosen = {order[int((i + 0.5) * len(train) / n)] for i in range(n)}
    return [item for i, item in enumerate(train) if i not in chosen], [train[i] for i in sorted(chosen)]


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as why:
        raise MixerError(f"data: {file} cannot be read as text ({why}).") from None
