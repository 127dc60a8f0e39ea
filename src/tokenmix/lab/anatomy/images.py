"""The images of an anatomy: files, a folder of files, or one split of a labelled set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import MixerError
from ..data import eval_batches, open_images
from ..data.image_source import image_endings, is_image
from ..data.images import IMAGE_SETS
from ..report.vision import load_image
from .subject import BATCH, ProbedModel


@dataclass(frozen=True)
class Images:
    """Images as a model receives them, with their names, and their labels where the set has some.

    Args:
        pixels: (B, C, H, W), normalised.
        labels: (B,) int64, or None.
        source: where they are from, in words.
    """

    pixels: Tensor
    names: list[str]
    labels: Tensor | None
    source: str


def load_images(given: Sequence[str], subject: ProbedModel, *, split: str = "test", limit: int = 512) -> Images:
    """Load images at the subject's size, normalised as it was trained.

    Args:
        given: image files; one folder that holds image files; or one labelled set: a name such as "digits", an
            .npz or .zip, or a folder with a folder for each class.
        split: of a labelled set: train, valid or test.
        limit: the most images; of files and folders the first by name, of a set the first in its order.

    Raises:
        MixerError: there are no images, or one cannot be read.
    """
    if not given:
        raise MixerError("look tokens: give images: files, a folder of files, or a labelled set such as digits.")
    if limit < 1:
        raise MixerError(f"look tokens: --limit must be at least 1, got {limit}.")
    files = _files(given)
    if files is None:
        return _labelled_images(given[0], subject, split, limit)
    mean, std = (torch.tensor(m).view(-1, 1, 1) for m in (subject.mean, subject.std))
    pixels = [(load_image(f, subject.image_size, subject.channels) - mean) / std for f in files[:limit]]
    return Images(torch.stack(pixels), [f.name for f in files[:limit]], None, f"{len(pixels)} image files")


def _files(given: Sequence[str]) -> list[Path] | None:
    """Return the image files that are meant; None where one labelled set is."""
    paths = [Path(g).expanduser() for g in given]
    if len(paths) > 1:
        return paths
    (path,) = paths
    if path.is_dir():
        inside = sorted(path.iterdir())
        files = [f for f in inside if not f.name.startswith(".") and _is_image(f)]
        if files:
            return files
        if not any(f.is_dir() for f in inside):
            raise MixerError(f"look tokens: the folder {path} contains no images.")
        return None
    if given[0] not in IMAGE_SETS and not path.exists():
        known = ", ".join(IMAGE_SETS)
        raise MixerError(f"look tokens: there are no images at {given[0]!r}; give files, a folder, or one of {known}.")
    return paths if _is_image(path) else None


def _is_image(file: Path) -> bool:
    return file.is_file() and (file.suffix.lower() in image_endings() or is_image(file))


def _labelled_images(source: str, subject: ProbedModel, split: str, limit: int) -> Images:
    data = open_images(source, channels=subject.channels)
    batches = eval_batches(
        data.split(split),
        batch_size=BATCH,
        image_size=subject.image_size,
        channels=subject.channels,
        mean=subject.mean,
        std=subject.std,
        limit=limit,
    )
    pixels, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    names = [f"{i}: {data.classes[int(label)]}" for i, label in enumerate(labels)]
    return Images(pixels, names, labels, f"the first {len(pixels)} images of {data.name}, {split} split")
