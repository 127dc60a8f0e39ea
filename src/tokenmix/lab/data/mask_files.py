"""A folder of images and masks: paired by name, checked and counted once, decoded on access."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import MixerError
from ...types import Record
from .bounds import Bounds
from .cache import cache_dir, read_note, sha256_of, write_note
from .image_cache import source_state
from .image_files import image_names
from .image_source import in_threads, opened_image, pil_to_tensor, read_image, turn_upright
from .inventory import Inventory
from .mask_legend import (
    NAMES,
    Legend,
    are_grey_labels,
    colour_of_number,
    grey_labels,
    legend_of,
    pack_colours,
    read_names,
)
from .mask_pairs import Pair, divide_pairs, find_pairs
from .pair_sampler import IGNORED
from .progress import with_progress
from .trees import folder_tree

if TYPE_CHECKING:
    from PIL.Image import Image


ORIENTATION = 0x0112  # EXIF's number of how a camera was held: 1 upright, from 5 on the sides are exchanged
SHOWN = 8  # values of masks in a message
Size = tuple[int, int]


@dataclass(frozen=True)
class MaskFolder:
    """A folder of images and masks.

    Args:
        pairs: files of image and mask in each split.
        sha256: that of all names and files.
        pixels: pixels of each class in the training masks.
        turn: whether masks are turned as their images are; see ``open_mask_folder``.
        inventory: what was found and what was left out.
    """

    legend: Legend
    pairs: dict[str, list[Pair]] = field(repr=False)
    sha256: str
    pixels: tuple[int, ...]
    turn: bool | None
    max_pixels: int
    inventory: Inventory = field(repr=False)

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes."""
        return self.legend.classes

    def read(self, split: str, i: int) -> tuple[Tensor, Tensor]:
        """Return image i of a split, uint8 (3, H, W), and its mask, int64 (H, W)."""
        image, mask = self.pairs[split][i]
        picture = pil_to_tensor(read_image(image, 3, max_pixels=self.max_pixels))
        raw = aligned_raw(image, mask, self.legend.colours is not None, self.turn, self.max_pixels)
        return picture, self.legend.read(raw, str(mask))


def open_mask_folder(
    root: Path,
    *,
    valid: float,
    ignore: int | None,
    first_label: int,
    empty_classes: bool,
    turn_masks: bool | None,
    max_pixels: int,
) -> MaskFolder:
    """Open a folder of images and masks.

    Images lie in images/, masks of the same names in masks/ (or annotations/, labels/), in any lossless format. Splits
    are folders above or below these: train, val, test, in any common spelling. Without them, images are held out by a
    hash of their names; with validation images but no test images, these are both.

    A mask holds labels (grey or palette, 8 or 16 bits), or colours. ``classes.txt``, if there is one, names a class on
    each line, for colours followed by red, green and blue (``sky 70 130 180``); lines named ``ignore`` give colours of
    no class. Without it, labels are counted up to the largest, and colours in the order of red, green and blue. Masks
    of nothing but 0 and 255 have two classes.

    All masks are read and checked the first time; what was found is kept in the user's cache until a file changes.

    Args:
        valid: share that is held out, twice.
        ignore: label of pixels that are not scored and not learned; None: none.
        first_label: label of the first class.
        empty_classes: accept classes without a pixel in the training masks.
        turn_masks: whether masks were drawn on images as they are stored and are turned as the EXIF orientation of
            their image says (True), or on upright images (False); None: told by the sizes, and refused where these do
            not tell.
        max_pixels: most pixels of an image.
    """
    read = Inventory(str(root))
    tree = folder_tree(root, Bounds(max_pixels=max_pixels))
    tree = replace(tree, names=[name for name in tree.names if name != NAMES])  # which is read, though it is no image
    pairs = divide_pairs(root, find_pairs(root, image_names(tree, read), read), valid)
    options = [valid, ignore, first_label, turn_masks, max_pixels]
    state = json.dumps(["masks-3", source_state(root), options])
    note = cache_dir() / "masks" / f"{hashlib.sha256(state.encode()).hexdigest()[:32]}.json"
    known = read_note(note)
    if known is None:
        known = _scan(root, pairs, ignore, first_label, turn_masks, max_pixels)
        write_note(note, known)
    legend = Legend.from_json(known["legend"])
    _check_classes(root, legend, known, empty_classes)
    read.count("images with masks", len({pair for part in pairs.values() for pair in part}))
    read.tell_counts("splits", {name: len(part) for name, part in pairs.items()})
    if pairs["valid"] == pairs["test"]:
        read.tell("note", "valid and test are the same images")
    read.tell_counts("pixels for training", dict(zip(legend.classes, known["pixels"], strict=True)))
    read.tell("pixels without a class", f"{known['without']:,}")
    if known["turned"]:
        read.count("images turned upright by EXIF", known["turned"])
    return MaskFolder(legend, pairs, known["sha256"], tuple(known["pixels"]), turn_masks, max_pixels, read)


def _check_classes(root: Path, legend: Legend, known: Record, empty_classes: bool) -> None:
    held = f"its masks hold {known['values']}" + f", and ignore={legend.ignore}" * (legend.ignore is not None)
    if len(legend.classes) < 2:
        raise MixerError(
            f"masks: {root} has {len(legend.classes)} class; a model needs two to tell apart; {held}; give another "
            + f"ignore (--data.ignore), or name the classes and their colours in {NAMES}."
        )
    labels = [int(value) for value in known["values"].split(", ") if value.isdecimal()]
    if legend.colours is None and labels and min(labels) > legend.first and min(labels) != legend.ignore:
        held += f"; if {min(labels)} is the first class, say first_label={min(labels)} (--data.first_label)"
    empty = [name for name, n in zip(legend.classes, known["pixels"], strict=True) if not n]
    if empty and not empty_classes:
        raise MixerError(
            f"masks: no pixel of the training masks of {root} is of class {empty[0]!r}; {held}; renumber or rename the "
            + f"classes, list grey levels as colours in {NAMES} (NAME 128 128 128), or accept that it is never learned "
            + "with data.empty_classes=true."
        )


def read_raw(file: Path, colours: bool, max_pixels: int) -> Tensor:
    """Read the pixels of a mask, int64 (H, W): labels, or colours as ``number_of`` gives them."""

    def convert(module: ModuleType, stored: Image) -> Tensor:
        image: Any = turn_upright(stored)
        if "A" in image.getbands() and image.getchannel("A").getextrema()[0] < 255:
            raise MixerError(f"masks: {file} has transparent pixels, whose class is unknown; save it without alpha.")
        if colours:
            return pack_colours(pil_to_tensor(image.convert("RGB")))
        if image.mode == "1":
            return (pil_to_tensor(image.convert("L"))[0] > 0).long()
        if image.mode in ("L", "P"):
            flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            return flat.view(image.height, image.width).long()
        if image.mode == "I" or image.mode.startswith("I;16"):
            import numpy

            return torch.from_numpy(numpy.asarray(image).astype(numpy.int64))
        if image.mode == "F":
            raise MixerError(
                f"masks: {file} has floating-point pixels; save labels as whole numbers, with 8 or 16 bits."
            )
        grey = pack_colours(pil_to_tensor(image.convert("RGB")))
        if bool((grey % 256 * 0x10101 != grey).any()):
            raise MixerError(
                f"masks: {file} has pixels of mode {image.mode!r}, while other masks hold labels; masks are all of "
                + "labels or all of colours."
            )
        return grey % 256

    return opened_image(file, str(file), max_pixels, convert)


def aligned_raw(image: Path, mask: Path, colours: bool, turn: bool | None, max_pixels: int) -> Tensor:
    """Read the pixels of a mask as ``read_raw`` does, turned upright with its image."""
    raw = read_raw(mask, colours, max_pixels)
    (height, width), how = _header(image, max_pixels)
    upright_size = (width, height) if how >= 5 else (height, width)
    got = raw.shape[0], raw.shape[1]
    if how != 1 and turn is None and _header(mask, max_pixels)[1] == 1 and got in ((height, width), upright_size):
        if how < 5 or height == width:
            raise MixerError(
                f"masks: the image {image} is turned upright (EXIF orientation {how}), and the size of its mask does "
                + "not tell whether it is to be turned too; say turn_masks=True (--data.turn_masks true) if masks were "
                + "drawn on the images as they are stored, False if on upright ones."
            )
        turn = got == (height, width)
    turned = bool(turn) and how != 1
    want = (height, width) if turned else upright_size
    if want != got:
        raise MixerError(
            f"masks: {mask} has {got[0]} x {got[1]} pixels, but its image {image} has {want[0]} x {want[1]}."
        )
    return _turn_upright(raw, how) if turned else raw


def _turn_upright(raw: Tensor, how: int) -> Tensor:
    """Turn pixels (H, W) upright as an EXIF orientation says."""
    raw = raw.mT if how >= 5 else raw
    return raw.flip([axis for axis, those in ((0, (3, 4, 7, 8)), (1, (2, 3, 6, 7))) if how in those])


def _header(file: Path, max_pixels: int) -> tuple[Size, int]:
    """Return height and width of an image as it is stored, and its EXIF orientation, without decoding it."""

    def look(module: ModuleType, image: Image) -> tuple[Size, int]:
        how = image.getexif().get(ORIENTATION, 1)
        return (image.height, image.width), how if how in range(1, 9) else 1

    return opened_image(file, str(file), max_pixels, look, load=False)


def _kind(file: Path, max_pixels: int) -> str:
    """Return "colours", "palette" or "labels" by the mode of a mask."""

    def look(module: ModuleType, image: Image) -> str:
        return "colours" if len(image.getbands()) > 1 else "palette" if image.mode == "P" else "labels"

    return opened_image(file, str(file), max_pixels, look, load=False)


def _check_black_and_white(each: dict[Pair, Counter[int]]) -> None:
    """Refuse masks of 0 and 1 beside others of 0 and 255, if no mask holds 1 and 255: 255 may then mean what 1 does."""
    held = {pair[1]: values.keys() - {0} for pair, values in each.items()}
    if set().union(*held.values()) == {1, 255} and not any(len(values) > 1 for values in held.values()):
        low, high = (next(str(mask) for mask, values in held.items() if label in values) for label in (1, 255))
        raise MixerError(
            f"masks: {low} holds 0 and 1, {high} 0 and 255, and no mask holds 1 and 255; save all masks alike, or say "
            + f"in {NAMES} what they mean (NAME 0 0 0, NAME 1 1 1, ignore 255 255 255; the white of 1 bit is 255 255 "
            + "255)."
        )


def _scan(
    root: Path, pairs: dict[str, list[Pair]], ignore: int | None, first: int, turn: bool | None, max_pixels: int
) -> Record:
    """Read all masks; return classes, their colours, pixels in training and a sha256 as JSON values."""
    files = sorted({pair for part in pairs.values() for pair in part})
    named = read_names(root / NAMES)
    given = any(colour is not None for _, colour in named)
    kinds = dict(zip((m for _, m in files), in_threads(lambda p: _kind(p[1], max_pixels), files), strict=True))
    colours = given or "colours" in kinds.values()

    def count(pair: Pair) -> tuple[Counter[int], str, bool]:
        image, mask = pair
        values, counts = aligned_raw(image, mask, colours, turn, max_pixels).unique(return_counts=True)
        found = Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        return found, f"{sha256_of(image)} {sha256_of(mask)}", _header(image, max_pixels)[1] != 1

    counted = dict(
        zip(files, with_progress(in_threads(count, files), len(files), f"reading the masks of {root}"), strict=True)
    )
    each = {pair: values for pair, (values, _, _) in counted.items()}
    total = sum(each.values(), Counter())
    if colours and not given and "labels" in kinds.values():
        plain, painted = (next(str(m) for m, kind in kinds.items() if kind == k) for k in ("labels", "colours"))
        raise MixerError(f"masks: {plain} holds labels and {painted} colours; save all masks alike.")
    if colours and not given and set(kinds.values()) == {"colours"} and are_grey_labels(total, ignore, first):
        colours, total = False, grey_labels(total)
        each = {pair: grey_labels(values) for pair, values in each.items()}
    if not colours:
        _check_black_and_white(each)
    legend = legend_of(root, named, total, colours, ignore, first)
    for (image, mask), values in each.items():
        if not values.keys() <= legend.table.keys():  # reading it names the place
            legend.read(aligned_raw(image, mask, colours, turn, max_pixels), str(mask))
    options = [ignore, first, legend.classes, *([] if turn is None else [turn])]
    digest = hashlib.sha256(repr(options).encode())
    for (image, mask), (_, content, _) in counted.items():
        digest.update(f"{image.relative_to(root)} {mask.relative_to(root)} {content}\n".encode())
    train = sum((each[pair] for pair in pairs["train"]), Counter())
    held = [str(colour_of_number(v) if colours else v) for v in sorted(total)]
    return {
        "legend": asdict(legend),
        "pixels": [train[key] if legend.table[key] == i else 0 for i, key in enumerate(legend.keys)],
        "without": sum(n for value, n in total.items() if legend.table[value] == IGNORED),
        "values": ", ".join(held[:SHOWN]) + ", ..." * (len(held) > SHOWN),
        "turned": sum(turned for _, _, turned in counted.values()),
        "sha256": digest.hexdigest(),
    }
