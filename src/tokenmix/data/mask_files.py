"""A folder of images and masks: paired by name, checked and counted once, decoded on access."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MixerError
from .bounds import Bounds
from .cache import cache_dir, read_note, sha256_of, write_note
from .class_folders import split_of
from .corpus import SPLITS
from .image_cache import hold_out, source_state
from .image_source import Part, image_endings, in_threads, opened_image, pil_to_tensor, read_image
from .mask_legend import FORM, NAMES, Legend, guessed_legend, number_of, packed, read_names
from .trees import folder_tree

Pair = tuple[Path, Path]
IMAGE_FOLDERS, MASK_FOLDERS = ("images",), ("masks", "annotations", "labels")
LOSSY = (".jpg", ".jpeg")
LAYOUT = "expected images/NAME.jpg with masks/NAME.png, or both inside of train/ and val/"


@dataclass(frozen=True)
class MaskFolder:
    """A folder of images and masks.

    Args:
        pairs: files of image and mask in each split.
        sha256: that of all names and files.
        pixels: pixels of each class in the training masks.
    """

    legend: Legend
    pairs: dict[str, list[Pair]] = field(repr=False)
    sha256: str
    pixels: tuple[int, ...]
    max_pixels: int

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes."""
        return self.legend.classes

    def read(self, split: str, i: int) -> tuple[Tensor, Tensor]:
        """Return image i of a split, uint8 (3, H, W), and its mask, int64 (H, W)."""
        image, mask = self.pairs[split][i]
        picture = pil_to_tensor(read_image(image, 3, max_pixels=self.max_pixels))
        raw = read_raw(mask, self.legend.colours is not None, self.max_pixels)
        _check_sizes(image, mask, tuple(picture.shape[1:]), tuple(raw.shape))
        return picture, self.legend.read(raw, str(mask))


def open_mask_folder(
    root: Path, *, valid: float, ignore: int | None, first_label: int, empty_classes: bool, max_pixels: int
) -> MaskFolder:
    """Open a folder of images and masks.

    Images lie in images/, masks of the same names in masks/ (or annotations/, labels/), in any lossless format. Splits
    are folders above or below these: train, val, test. Without them, images are held out by a hash of their names; with
    validation images but no test images, these are both.

    A mask holds labels (grey or palette, 8 or 16 bits), or colours. ``classes.txt``, if there is one, names a class on
    each line, for colours followed by red, green and blue (``sky 70 130 180``); lines named ``ignore`` give colours of
    no class. Without it, labels are counted up to the largest, and colours in the order of red, green and blue.

    All masks are read and checked the first time; what was found is kept in the user's cache until a file changes.

    Args:
        valid: share that is held out, twice.
        ignore: label of pixels that are not scored and not learned; None: none.
        first_label: label of the first class.
        empty_classes: accept classes without a pixel in the training masks.
        max_pixels: most pixels of an image.
    """
    names = folder_tree(root, Bounds(max_pixels=max_pixels)).names
    pairs = _split(root, _pairs(root, names), valid)
    options = [valid, ignore, first_label, max_pixels]
    state = json.dumps(["masks-1", source_state(root), options])
    note = cache_dir() / "masks" / f"{hashlib.sha256(state.encode()).hexdigest()[:32]}.json"
    known = read_note(note)
    if known is None:
        known = _scan(root, pairs, ignore, first_label, max_pixels)
        write_note(note, known)
    colours = None if known["colours"] is None else tuple((r, g, b) for r, g, b in known["colours"])
    ignored = tuple((r, g, b) for r, g, b in known["ignored"])
    legend = Legend(tuple(known["classes"]), colours, ignored, ignore, first_label)
    if len(legend.classes) < 2:
        raise MixerError(f"masks: {root} has {len(legend.classes)} class; a model needs two to tell apart.")
    empty = [name for name, n in zip(legend.classes, known["pixels"], strict=True) if not n]
    if empty and not empty_classes:
        raise MixerError(
            f"masks: no pixel of the training masks of {root} is of class {empty[0]!r}; renumber or rename the "
            + "classes, or accept that it is never learned with data.empty_classes=true."
        )
    return MaskFolder(legend, pairs, known["sha256"], tuple(known["pixels"]), max_pixels)


def read_raw(file: Path, colours: bool, max_pixels: int) -> Tensor:
    """Read the pixels of a mask, int64 (H, W): labels, or colours as ``number_of`` gives them."""

    def convert(module: Any, image: Any) -> Tensor:
        if colours:
            return packed(pil_to_tensor(image.convert("RGB")))
        if image.mode == "1":
            return (pil_to_tensor(image.convert("L"))[0] > 0).long()
        if image.mode in ("L", "P"):
            flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            return flat.view(image.height, image.width).long()
        if image.mode == "I" or image.mode.startswith("I;16"):
            import numpy

            return torch.from_numpy(numpy.asarray(image).astype(numpy.int64))
        raise MixerError(
            f"masks: {file} has pixels of mode {image.mode!r}, while other masks hold labels; masks are all of labels "
            + "or all of colours."
        )

    return opened_image(file, str(file), max_pixels, convert)


def _is_coloured(file: Path, max_pixels: int) -> bool:
    return opened_image(file, str(file), max_pixels, lambda module, image: len(image.getbands()) > 1, load=False)


def _image_size(file: Path, max_pixels: int) -> tuple[int, int]:
    """Return height and width of an upright image without decoding it."""

    def size(module: Any, image: Any) -> tuple[int, int]:
        turned = image.getexif().get(0x0112, 1) >= 5  # EXIF orientations that exchange the sides
        return (image.width, image.height) if turned else (image.height, image.width)

    return opened_image(file, str(file), max_pixels, size, load=False)


def _check_sizes(image: Path, mask: Path, want: tuple[int, ...], got: tuple[int, ...]) -> None:
    if want != got:
        raise MixerError(
            f"masks: {mask} has {got[0]} x {got[1]} pixels, but its image {image} has {want[0]} x {want[1]}."
        )


def _pairs(root: Path, names: Iterable[str]) -> dict[str, list[Pair]]:
    """Return pairs of files by part, "all" where there are no splits, sorted by name."""
    images: dict[tuple[str, str], str] = {}
    masks: dict[tuple[str, str], str] = {}
    for name in names:
        parts = name.split("/")
        if not name.lower().endswith(tuple(image_endings())) or len(parts) < 2:
            continue
        role = next((i for i in (0, 1) if parts[i] in IMAGE_FOLDERS + MASK_FOLDERS and i < len(parts) - 1), None)
        if role is None:
            continue
        rest = parts[:role] + parts[role + 1 :]
        part = split_of(rest[0]) if len(rest) > 1 else None
        inner = "/".join(rest[1:] if part else rest)
        key = part or "all", inner.rsplit(".", 1)[0]
        found = images if parts[role] in IMAGE_FOLDERS else masks
        if key in found:
            raise MixerError(f"masks: {root / found[key]} and {root / name} have the same name; remove one.")
        if found is masks and name.lower().endswith(LOSSY):
            raise MixerError(f"masks: {root / name} is compressed with loss, which changes labels; save masks as PNG.")
        found[key] = name
    if not images:
        raise MixerError(f"masks: {root} contains no images; {LAYOUT}.")
    for key, name in sorted(images.items()):
        if key not in masks:
            raise MixerError(f"masks: the image {root / name} has no mask; {LAYOUT}.")
    for key, name in sorted(masks.items()):
        if key not in images:
            raise MixerError(f"masks: the mask {root / name} has no image; {LAYOUT}.")
    pairs: dict[str, list[Pair]] = {}
    for key in sorted(images):
        pairs.setdefault(key[0], []).append((root / images[key], root / masks[key]))
    if "all" in pairs and len(pairs) > 1:
        raise MixerError(f"masks: {pairs['all'][0][0]} is in no split, though others are; {LAYOUT}.")
    return pairs


def _split(root: Path, pairs: dict[str, list[Pair]], valid: float) -> dict[str, list[Pair]]:
    """Divide pairs into train, valid and test."""
    found = dict(pairs)
    train = found.get("all") or found.get("train")
    if train is None:
        raise MixerError(f"masks: {root} has no training images; {LAYOUT}.")
    if "valid" not in found and "test" not in found:
        train, test = _held(train, valid, root)
        train, held = _held(train, valid / (1 - valid), root)
        found = {"train": train, "valid": held, "test": test}
    for one, other in (("valid", "test"), ("test", "valid")):
        found.setdefault(one, found.get(other, []))
    return {name: found[name] for name in SPLITS}


def _held(pairs: list[Pair], share: float, root: Path) -> tuple[list[Pair], list[Pair]]:
    """Hold out a share of the pairs, at least one, by a hash of their names."""
    if len(pairs) < 2:
        raise MixerError(
            f"masks: {root} has {len(pairs)} images left to hold some out of; a folder without splits needs at least 3."
        )
    part = Part([0] * len(pairs), [image.name for image, _ in pairs], lambda i, channels: torch.empty(0))
    kept, held = hold_out([(part, i) for i in range(len(pairs))], share, root.name)
    return [pairs[i] for _, i in kept], [pairs[i] for _, i in held]


def _scan(root: Path, pairs: dict[str, list[Pair]], ignore: int | None, first: int, max_pixels: int) -> dict[str, Any]:
    """Read all masks; return classes, their colours, pixels in training and a sha256 as JSON values."""
    files = sorted({pair for part in pairs.values() for pair in part})
    named = read_names(root / NAMES)
    with_colours = [c for _, c in named if c is not None]
    colours = bool(with_colours) or any(_is_coloured(mask, max_pixels) for _, mask in files)

    names = [n for n, c in named if n != "ignore"]
    given = tuple(c for n, c in named if n != "ignore" and c is not None)
    ignored = tuple(c for n, c in named if n == "ignore" and c is not None)
    if named and colours and len(given) != len(names):
        raise MixerError(f"masks: {root / NAMES} names classes without colours, but masks are pictures; {FORM}.")
    legend = Legend(tuple(names), given if colours else None, ignored, ignore, first)

    def count(pair: Pair) -> tuple[Counter[int], str]:
        image, mask = pair
        raw = read_raw(mask, colours, max_pixels)
        _check_sizes(image, mask, _image_size(image, max_pixels), tuple(raw.shape))
        values, counts = raw.unique(return_counts=True)
        if named and (with_colours or not colours):
            legend.read(raw, str(mask))
        found = Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        return found, f"{sha256_of(image)} {sha256_of(mask)}"

    counted = dict(zip(files, in_threads(count, files), strict=True))
    total: Counter[int] = Counter()
    for values, _ in counted.values():
        total += values
    if not named:
        legend = guessed_legend(root, total, colours, ignore, first)
    train: Counter[int] = Counter()
    for pair in pairs["train"]:
        train += counted[pair][0]
    keys = [number_of(c) for c in legend.colours] if legend.colours is not None else None
    each = [train[first + i if keys is None else keys[i]] for i in range(len(legend.classes))]
    digest = hashlib.sha256(repr([ignore, first, legend.classes]).encode())
    for (image, mask), (_, content) in counted.items():
        digest.update(f"{image.relative_to(root)} {mask.relative_to(root)} {content}\n".encode())
    return {
        "classes": list(legend.classes),
        "colours": None if legend.colours is None else [list(c) for c in legend.colours],
        "ignored": [list(c) for c in ignored],
        "pixels": each,
        "sha256": digest.hexdigest(),
    }
