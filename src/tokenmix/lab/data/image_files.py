"""Folders and archives of images: CLASS/*.jpg, the ImageNet layout, Tiny-ImageNet."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from ...errors import MixerError
from .class_folders import arrange, split_of
from .image_source import Found, ImagePart, image_endings, is_image, pil_to_tensor, read_image
from .inventory import Inventory, first_names
from .packed import BAD_ZIP
from .trees import BAD_TAR, Tree

ENDINGS_SHOWN = 8  # kinds of files left out that are counted apart


def image_names(tree: Tree, read: Inventory) -> list[str]:
    """Return the images of a tree: files of a known ending, and others whose content is that of an image.

    What is left out is added to ``read``, by its ending.
    """
    known, images = image_endings(), []
    other: dict[str, list[str]] = {}
    for why, names in tree.left.items():
        if names:
            read.leave(why, *names)
    for name in tree.names:
        ending = os.path.splitext(name)[1].lower()
        if ending in known:
            images.append(name)
        elif is_image(tree.open(name)):
            images.append(name)
            read.count("images told by their content")
        else:
            other.setdefault(f"no images ({ending or 'no ending'})", []).append(name)
    for i, (why, names) in enumerate(sorted(other.items(), key=lambda pair: -len(pair[1]))):
        read.leave(why if i < ENDINGS_SHOWN else "no images (other endings)", *names)
    return images


def decode_image(tree: Tree, name: str, channels: int) -> Tensor:
    """Decode an image of a tree, uint8 (C, H, W)."""
    shown = str(tree.root / name).replace("\n", "\\n")
    try:
        return pil_to_tensor(read_image(tree.open(name), channels, shown, max_pixels=tree.bounds.max_pixels))
    except (*BAD_ZIP, *BAD_TAR) as why:
        if isinstance(why, MixerError):
            raise
        raise MixerError(f"images: {shown} is damaged or truncated ({' '.join(str(why).split())}).") from why


def read_tree(tree: Tree, layout: str | None = None) -> Found:
    """Return classes and parts of a tree of image files; the layout is that of ``arrange``."""
    read = Inventory(str(tree.root))
    read.count("files", len(tree.names))
    images = image_names(tree, read)
    if not images:
        held = f"; it holds {first_names(tree.names)}" if tree.names else ""
        raise MixerError(
            f"images: {tree.root} contains no images{held}; expected CLASS/*.jpg, or train/CLASS/*.jpg beside "
            + "val/CLASS/*.jpg."
        )
    while (top := _wrapper(images)) is not None:
        tree, images = tree.subtree(top), [n.removeprefix(f"{top}/") for n in images]
        read.tell("inside of", tree.root.name)
    if "val/val_annotations.txt" in tree.names:
        return _tiny_imagenet(tree, images, read)
    found = arrange(images, tree.folders, root=tree.root, layout=layout, read=read)
    parts = {part: _part(tree, [n for n, _ in files], [y for _, y in files]) for part, files in found.parts.items()}
    return Found(found.classes, 3, parts, read)


def _wrapper(images: list[str]) -> str | None:
    """Return the only folder around all images, if it is neither a split nor the folder of a class."""
    tops = {n.split("/")[0] for n in images}
    if len(tops) > 1 or split_of(min(tops)) or not all(n.count("/") > 1 for n in images):
        return None
    return tops.pop()


def _part(tree: Tree, names: list[str], labels: list[int]) -> ImagePart:
    base = os.path.abspath(tree.root)
    files = [Path(base, n) for n in names] if tree.content is None else []
    return ImagePart(labels, names, lambda i, channels: decode_image(tree, names[i], channels), files)


def _tiny_imagenet(tree: Tree, images: list[str], read: Inventory) -> Found:
    """Read train/WNID/images/*.JPEG and val/images/*.JPEG.

    The classes of the latter are in val/val_annotations.txt; the files in test/ have no labels.
    """
    train = [n for n in images if n.startswith("train/")]
    classes = tuple(sorted({n.split("/")[1] for n in train}))
    if len(classes) < 2:
        raise MixerError(
            f"images: {tree.root} looks like Tiny-ImageNet, but train/ has images of {len(classes)} classes; "
            + "at least 2 are needed."
        )
    number = {c: i for i, c in enumerate(classes)}
    lines = tree.bytes("val/val_annotations.txt").decode("utf-8", "replace").splitlines()
    named = [line.split("\t")[:2] for line in lines if line.strip()]
    wrong = [row for row in named if len(row) < 2 or row[1] not in number]
    if wrong or not named:
        raise MixerError(
            f"images: {tree.root / 'val/val_annotations.txt'}: "
            + f"line {wrong[0] if wrong else '(none)'} does not name a file and a class of train/."
        )
    valid = [f"val/images/{file}" for file, _ in named]
    if missing := set(valid) - set(tree.names):
        raise MixerError(f"images: {tree.root / min(missing)} is named in val_annotations.txt but missing.")
    if unlabelled := sorted(set(images) - {*train, *valid}):
        read.leave("without a label", *unlabelled)
    parts = {
        "train": _part(tree, train, [number[n.split("/")[1]] for n in train]),
        "valid": _part(tree, valid, [number[c] for _, c in named]),
    }
    return Found(classes, 3, parts, read)
