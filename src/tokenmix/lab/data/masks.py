"""Images with a mask of classes: synthetic scenes, or a folder of images and masks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...errors import MixerError
from ...types import Record
from .bounds import MAX_PIXELS
from .corpus import SPLITS, check_split
from .inventory import Inventory
from .mask_files import MaskFolder, open_mask_folder
from .pair_sampler import IGNORED
from .scenes import SCENE_CLASSES, scene

MASK_SETS = {"scenes": "synthetic: textured shapes that cover each other, drawn from a seed; 6 classes, no download"}
COLOURS: tuple[tuple[str, tuple[int, int, int]], ...] = (
    ("black", (0, 0, 0)),
    ("blue", (31, 119, 180)),
    ("orange", (255, 127, 14)),
    ("green", (44, 160, 44)),
    ("red", (214, 39, 40)),
    ("purple", (148, 103, 189)),
    ("brown", (140, 86, 75)),
    ("pink", (227, 119, 194)),
    ("yellow", (220, 220, 34)),
    ("cyan", (23, 190, 207)),
)
"""Colours of the first classes in pictures, with their names."""
WHITE = (255, 255, 255)  # of pixels that are ignored


@dataclass(frozen=True, eq=False)
class MaskSplit:
    """One split of a set of images with masks.

    Args:
        name: "train", "valid" or "test".
        count: number of images.
        read: function that returns image i, uint8 (3, H, W), and its mask, int64 (H, W), with ``IGNORED`` where a pixel
            belongs to no class. Each image may have a size of its own.
    """

    name: str
    count: int
    read: Callable[[int], tuple[Tensor, Tensor]] = field(repr=False)

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, eq=False)
class MaskData:
    """A set of images with masks.

    Args:
        name: name of the set, or of its folder.
        classes: names of the classes, in the order of their labels.
        fingerprint: sha256 of what the images and masks are read from.
        splits: the splits by name.
        inventory: what was found in a folder, and what was left out.
    """

    name: str
    classes: tuple[str, ...]
    fingerprint: str
    splits: dict[str, MaskSplit] = field(repr=False)
    inventory: Inventory | None = field(default=None, repr=False)

    def split(self, name: str) -> MaskSplit:
        """Return a split by name."""
        check_split(f"masks {self.name}", name, self.splits)
        return self.splits[name]

    def describe(self) -> Record:
        """Return what env.json records."""
        return {
            "name": self.name,
            "images": [len(self.splits[s]) for s in SPLITS],
            "classes": len(self.classes),
            "names": list(self.classes),
            "sha256": self.fingerprint,
        }


def open_masks(
    source: str,
    *,
    size: tuple[int, int] = (64, 64),
    scenes: int = 2000,
    valid: float = 0.1,
    ignore: int | None = 255,
    first_label: int = 0,
    empty_classes: bool = False,
    turn_masks: bool | None = None,
    max_pixels: int = MAX_PIXELS,
) -> MaskData:
    """Open a set of images with masks.

    Args:
        source: "scenes" (``data.scenes``), or the path of a folder of images and masks, see ``open_mask_folder``.
        size: height and width of scenes.
        scenes: training scenes, at least 10; a tenth as many are for validation, and as many for the test.
        valid: share of the images of a folder without splits that is held out for validation, and again for the test.
        ignore, first_label, empty_classes, turn_masks, max_pixels: those of ``open_mask_folder``.

    Raises:
        MixerError: in one line that names the file or the option.
    """
    if source == "scenes":
        return _scenes(size, scenes)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise MixerError(
            f"masks: there is no folder {source!r}; give a folder of images/ and masks/, or {', '.join(MASK_SETS)}."
        )
    found = open_mask_folder(
        folder,
        valid=valid,
        ignore=ignore,
        first_label=first_label,
        empty_classes=empty_classes,
        turn_masks=turn_masks,
        max_pixels=max_pixels,
    )
    splits = {
        name: MaskSplit(name, len(pairs), partial(_read_pair, found, name)) for name, pairs in found.pairs.items()
    }
    return MaskData(folder.resolve().name, found.classes, found.sha256, splits, found.inventory)


def _read_pair(folder: MaskFolder, split: str, i: int) -> tuple[Tensor, Tensor]:
    return folder.read(split, i)


def _scenes(size: tuple[int, int], count: int, seed: int = 0) -> MaskData:
    """Open the synthetic scenes; those of a split follow those of the split before it."""
    if count < 10:
        raise MixerError(f"masks: scenes={count} must be at least 10 (data.scenes).")
    held = count // 10
    starts = {"train": (0, count), "valid": (count, held), "test": (count + held, held)}
    splits = {name: MaskSplit(name, n, partial(_scene_at, seed, start, size)) for name, (start, n) in starts.items()}
    digest = hashlib.sha256(repr((size, count, seed)).encode())
    for i in range(4):  # shows a change of the formulas
        for part in scene(seed, i, size):
            digest.update(bytes(part.to(torch.uint8).flatten().tolist()))
    return MaskData("scenes", SCENE_CLASSES, digest.hexdigest(), splits)


def _scene_at(seed: int, start: int, size: tuple[int, int], i: int) -> tuple[Tensor, Tensor]:
    return scene(seed, start + i, size)


def colour_of(label: int) -> tuple[int, int, int]:
    """Return the colour of a class in pictures; beyond those of ``COLOURS``, a hash of its label."""
    if label < len(COLOURS):
        return COLOURS[label][1]
    digest = hashlib.sha256(str(label).encode()).digest()
    return digest[0], digest[1], digest[2]


def paint_mask(mask: Tensor, classes: int) -> Tensor:
    """Paint masks (..., H, W) as uint8 (..., 3, H, W); what is ignored is white."""
    table = torch.tensor([*(colour_of(i) for i in range(classes)), WHITE], dtype=torch.uint8)
    return table[mask.masked_fill(mask == IGNORED, classes)].movedim(-1, -3)
