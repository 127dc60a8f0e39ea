"""Folders and .zip files of images: CLASS/*.jpg, the ImageNet layout, Tiny-ImageNet."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import MixerError
from .bounds import Bounds, check_names, check_regular, walk_links
from .image_source import Found, Part, pil_to_tensor, read_image
from .packed import BAD_ZIP

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
PART_NAMES = {"train": "train", "val": "valid", "valid": "valid", "validation": "valid", "test": "test"}
LAYOUT = "expected CLASS/*.jpg, or train/CLASS/*.jpg beside val/CLASS/*.jpg"


@dataclass(frozen=True)
class Tree:
    """The files of a folder or of a .zip by their relative names, sorted."""

    root: Path
    names: list[str]
    archive: zipfile.ZipFile | None = None
    prefix: str = ""
    bounds: Bounds = Bounds()

    def open(self, name: str) -> Any:
        return self.root / name if self.archive is None else io.BytesIO(self.archive.read(self.prefix + name))

    def text(self, name: str) -> list[str]:
        """Return the lines of a text file."""
        if self.archive is None:
            check_regular("images", self.root / name)
        raw = (self.root / name).read_bytes() if self.archive is None else self.archive.read(self.prefix + name)
        return raw.decode("utf-8", "replace").splitlines()

    def image(self, name: str, channels: int) -> Tensor:
        shown = str(self.root / name).replace("\n", "\\n")
        try:
            return pil_to_tensor(read_image(self.open(name), channels, shown, max_pixels=self.bounds.max_pixels))
        except (*BAD_ZIP, OSError, EOFError) as why:
            raise MixerError(f"images: {shown} is damaged or truncated ({' '.join(str(why).split())}).") from why


def folder_tree(root: Path, bounds: Bounds) -> Tree:
    """List the files in a folder, without hidden ones."""
    found: list[str] = []
    for folder, folders, names in walk_links(root):
        folders[:] = [f for f in folders if not f.startswith((".", "__"))]
        found += [Path(folder, n).relative_to(root).as_posix() for n in names if not n.startswith(".")]
    return Tree(root, sorted(found), bounds=bounds)


def zip_tree(file: Path, bounds: Bounds) -> Tree:
    """List the files in a .zip; a single folder around everything is skipped."""
    try:
        archive = zipfile.ZipFile(file)
    except (*BAD_ZIP, OSError) as why:
        raise MixerError(f"images: {file} is not a readable zip archive ({why}).") from why
    bounds.check(file, sum(info.file_size for info in archive.infolist()))
    check_names(file, [n for n in archive.namelist() if not n.endswith("/")])
    names = [
        n
        for n in archive.namelist()
        if not n.endswith("/") and not any(p.startswith((".", "__")) for p in n.split("/"))
    ]
    tops = {n.split("/")[0] for n in names}
    prefix = f"{tops.pop()}/" if len(tops) == 1 and all("/" in n for n in names) else ""
    if prefix.removesuffix("/") in PART_NAMES:
        prefix = ""
    return Tree(file, sorted(n.removeprefix(prefix) for n in names), archive, prefix, bounds)


def read_tree(tree: Tree) -> Found:
    """Return classes and parts of a tree of image files."""
    if "val/val_annotations.txt" in tree.names:
        return _tiny_imagenet(tree)
    images = [n for n in tree.names if n.lower().endswith(SUFFIXES)]
    if not images:
        raise MixerError(f"images: {tree.root} contains no images ({', '.join(SUFFIXES)}); {LAYOUT}.")
    split = any(n.startswith("train/") for n in images)
    by_part: dict[str, list[str]] = {}
    for name in images:
        part = PART_NAMES.get(name.split("/")[0]) if split else "all"
        if part is not None:
            by_part.setdefault(part, []).append(name)
    depth = 1 if split else 0
    flat = [n for names in by_part.values() for n in names if n.count("/") <= depth]
    if flat:
        raise MixerError(f"images: {tree.root / flat[0]} is not in a class folder; {LAYOUT}.")
    classes = _classes(tree, by_part["train" if split else "all"], depth)
    number = {c: i for i, c in enumerate(classes)}
    parts = {
        part: _part(tree, names, [_label(tree, n, number, depth) for n in names]) for part, names in by_part.items()
    }
    if set(parts) == {"train"}:
        parts = {"all": parts["train"]}
    return Found(classes, 3, parts)


def _classes(tree: Tree, names: list[str], depth: int) -> tuple[str, ...]:
    classes = tuple(sorted({n.split("/")[depth] for n in names}))
    if len(classes) < 2:
        raise MixerError(
            f"images: {tree.root} has only one class ({classes[0]}); a data set needs at least two class folders: "
            + f"{LAYOUT}."
        )
    if tree.archive is None:
        above = tree.root / "train" if depth else tree.root
        folders = {p.name for p in above.iterdir() if p.is_dir() and not p.name.startswith((".", "__"))}
        if empty := sorted(folders - set(classes)):
            raise MixerError(f"images: the class folder {above / empty[0]} contains no images; remove it or fill it.")
    return classes


def _label(tree: Tree, name: str, number: dict[str, int], depth: int) -> int:
    if name.split("/")[depth] not in number:
        raise MixerError(
            f"images: {tree.root / name} belongs to a class that is not among the {len(number)} in train/."
        )
    return number[name.split("/")[depth]]


def _part(tree: Tree, names: list[str], labels: list[int]) -> Part:
    files = [tree.root / n for n in names] if tree.archive is None else []
    return Part(labels, names, lambda i, channels: tree.image(names[i], channels), files)


def _tiny_imagenet(tree: Tree) -> Found:
    """Read train/WNID/images/*.JPEG and val/images/*.JPEG.

    The classes of the latter are in val/val_annotations.txt; the files in test/ have no labels.
    """
    train = [n for n in tree.names if n.startswith("train/") and n.lower().endswith(SUFFIXES)]
    classes = tuple(sorted({n.split("/")[1] for n in train}))
    if len(classes) < 2:
        raise MixerError(
            f"images: {tree.root} looks like Tiny-ImageNet, but train/ has images of {len(classes)} classes; "
            + "at least 2 are needed."
        )
    number = {c: i for i, c in enumerate(classes)}
    named = [line.split("\t")[:2] for line in tree.text("val/val_annotations.txt") if line.strip()]
    wrong = [row for row in named if len(row) < 2 or row[1] not in number]
    if wrong or not named:
        raise MixerError(
            f"images: {tree.root / 'val/val_annotations.txt'}: "
            + f"line {wrong[0] if wrong else '(none)'} does not name a file and a class of train/."
        )
    valid = [f"val/images/{file}" for file, _ in named]
    if missing := set(valid) - set(tree.names):
        raise MixerError(f"images: {tree.root / min(missing)} is named in val_annotations.txt but missing.")
    parts = {
        "train": _part(tree, train, [number[n.split("/")[1]] for n in train]),
        "valid": _part(tree, valid, [number[c] for _, c in named]),
    }
    return Found(classes, 3, parts)
