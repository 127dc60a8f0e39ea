"""Which mask belongs to which image, by the names in a folder of images and masks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from ...errors import MixerError
from .class_folders import split_of
from .corpus import SPLITS
from .image_cache import hold_out
from .image_source import ImagePart
from .inventory import Inventory, first_names

Pair = tuple[Path, Path]
IMAGE_FOLDERS = {"images", "image", "imgs", "img", "jpegimages"}
MASK_FOLDERS = {"masks", "mask", "annotations", "annotation", "labels", "label", "segmentationclass"}
LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif")
LAYOUT = "expected images/NAME.jpg with masks/NAME.png, or both inside of train/ and val/"
Key = tuple[str, str]
"""The part and the name without its ending."""


def find_pairs(root: Path, names: Iterable[str], read: Inventory) -> dict[str, list[Pair]]:
    """Return pairs of files by part, "all" where there are no splits, sorted by name."""
    images: dict[Key, str] = {}
    masks: dict[Key, str] = {}
    spelled: dict[tuple[bool, str], str] = {}
    for name in names:
        parts = name.split("/")
        role = next((i for i in (0, 1) if i < len(parts) - 1 and _is_role(parts[i])), None)
        if role is None:
            read.leave("outside of images/ and masks/", name)
            continue
        rest, is_image = parts[:role] + parts[role + 1 :], parts[role].lower() in IMAGE_FOLDERS
        part = split_of(rest[0]) if len(rest) > 1 else None
        if part is not None and spelled.setdefault((is_image, part), rest[0]) != rest[0]:
            raise MixerError(
                f"masks: {root} has {spelled[is_image, part]} and {rest[0]}, which are both the split {part!r}; keep "
                + "one."
            )
        key = part or "all", "/".join(rest[1:] if part else rest).rsplit(".", 1)[0]
        found = images if is_image else masks
        if key in found:
            raise MixerError(f"masks: {root / found[key]} and {root / name} have the same name; remove one.")
        if not is_image and name.lower().endswith(LOSSY):
            raise MixerError(f"masks: {root / name} is compressed with loss, which changes labels; save masks as PNG.")
        found[key] = name
    _check_partners(root, images, masks)
    pairs: dict[str, list[Pair]] = {}
    for key in sorted(images):
        pairs.setdefault(key[0], []).append((root / images[key], root / masks[key]))
    if "all" in pairs and len(pairs) > 1:
        raise MixerError(
            f"masks: {pairs['all'][0][0]} is in no split (of {len(pairs['all'])} such images), though others are; "
            + f"{LAYOUT}."
        )
    return pairs


def _is_role(folder: str) -> bool:
    return folder.lower() in IMAGE_FOLDERS | MASK_FOLDERS


def _check_partners(root: Path, images: dict[Key, str], masks: dict[Key, str]) -> None:
    if not images:
        raise MixerError(f"masks: {root} contains no images{' but masks' if masks else ''}; {LAYOUT}.")
    without = []
    for these, those, kind, other in ((images, masks, "images", "mask"), (masks, images, "masks", "image")):
        if alone := sorted(name for key, name in these.items() if key not in those):
            have = "have" if len(alone) > 1 else "has"
            without.append(f"{len(alone):,} of {len(these):,} {kind} {have} no {other} ({first_names(alone)})")
    if without:
        raise MixerError(f"masks: {root}: {' and '.join(without)}; {LAYOUT}.")


def divide_pairs(root: Path, pairs: dict[str, list[Pair]], valid: float) -> dict[str, list[Pair]]:
    """Divide pairs into train, valid and test."""
    found = dict(pairs)
    train = found.get("all") or found.get("train")
    if train is None:
        raise MixerError(f"masks: {root} has no training images, only {', '.join(sorted(found))}; {LAYOUT}.")
    if "valid" not in found and "test" not in found:
        train, test = _hold_out(train, valid, root)
        train, held = _hold_out(train, valid / (1 - valid), root)
        found = {"train": train, "valid": held, "test": test}
    for one, other in (("valid", "test"), ("test", "valid")):
        found.setdefault(one, found.get(other, []))
    return {name: found[name] for name in SPLITS}


def _hold_out(pairs: list[Pair], share: float, root: Path) -> tuple[list[Pair], list[Pair]]:
    """Hold out a share of the pairs, at least one, by a hash of their names."""
    if len(pairs) < 2:
        raise MixerError(
            f"masks: {root} has {len(pairs)} images left to hold some out of; a folder without splits needs at least 3."
        )
    part = ImagePart([0] * len(pairs), [image.name for image, _ in pairs], lambda i, channels: torch.empty(0))
    kept, held = hold_out([(part, i) for i in range(len(pairs))], share, root.name)
    return [pairs[i] for _, i in kept], [pairs[i] for _, i in held]
