"""The config of images."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from ...errors import MixerError
from ..data.augment import Augment
from ..data.bounds import MAX_PIXELS
from .class_losses import BALANCED
from .registry import TaskData


@dataclass(frozen=True)
class ImageDataConfig(TaskData):
    """The images of a classifier, a density model or a diffusion transformer.

    Args:
        source: name of an image set (default "digits") or path of a folder, .npz, .zip or .tar file.
        path: local copy of a named set; None: downloaded, unless the set comes with a library (digits).
        valid: share of the training images held out for validation (a fraction below 1) or their number (1 or more);
            None: 0.1 where the set has no validation split of its own. With ``long_tail`` also 0: nothing is held out,
            as in the papers, and validation is on the test split.
        long_tail: imbalance factor, 1 or more. Of the training images, class c of C keeps
            n * long_tail^(-c / (C - 1)), so that the last one has n / long_tail; 1: as many of each. None: all images.
        per_class: the n of ``long_tail``, at least 1; None: as many as the classes have.
        shrink: factor by which height and width are divided, at least 1: each square of shrink x shrink pixels becomes
            one, their mean, rounded. Height and width must be multiples of it. 1: images as they are.
        loss: loss of a classifier: "cross_entropy", "balanced_cross_entropy", "bce", "class_balanced_bce" or
            "balanced_bce"; see ``train.ClassLoss``.
        loss_tau: scale of the bias of the balanced losses, 0 or more.
        augment: what happens to training images (see ``Augment``), by default nothing. A density model takes ``flip``,
            ``shift`` and ``repeats`` only; a diffusion transformer all but ``mixup``, ``cutmix``, ``erasing`` and
            ``randaugment``.
        smoothing: label smoothing, in [0, 1); 0: none.
        mean: mean of each channel, for pixels in 0..1, subtracted from them; None: that of ImageNet for colour images,
            0.5 for grey ones and for diffusion transformers.
        std: standard deviation of each channel, above 0, by which pixels are then divided; None: as for ``mean``.
        skip_bad_files: leave out files that cannot be read, with a warning, instead of refusing the set.
        layout: "classes": the first folders are classes, whatever their names; "splits": they are splits, and others
            are left out; None: told by the names, and refused where these can be understood in two ways.
        max_unpacked: bytes that an archive may unpack to, at least 1; None: 64 MiB or 100 times the archive's size,
            whichever is more.
        max_pixels: pixels that an image file may have, at least 1; default 89,478,485, where Pillow begins to warn.
    """

    source: str = "digits"
    path: str | None = None
    valid: float | None = None
    long_tail: float | None = None
    per_class: int | None = None
    shrink: int = 1
    loss: str = "cross_entropy"
    loss_tau: float = 1.0
    augment: Augment = field(default_factory=Augment)
    smoothing: float = 0.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    skip_bad_files: bool = False
    layout: str | None = None
    max_unpacked: int | None = None
    max_pixels: int = MAX_PIXELS
    kind: ClassVar[str] = "images"


def check_images(data: ImageDataConfig) -> None:
    """Refuse options of images that are out of range."""
    if not 0 <= data.smoothing < 1:
        raise MixerError(f"config: data.smoothing must be in [0, 1), got {data.smoothing}.")
    if data.valid is not None and not (data.valid > 0 or (data.valid == 0 and data.long_tail is not None)):
        raise MixerError(f"config: data.valid must be a positive fraction or number of images, got {data.valid}.")
    if data.long_tail is not None and not 1 <= data.long_tail < math.inf:
        raise MixerError(
            "config: data.long_tail is the images of the largest class over those of the smallest, at least 1 (1: as "
            + f"many of each), got {data.long_tail}."
        )
    if data.shrink < 1:
        raise MixerError(
            f"config: data.shrink must be at least 1, the side of the squares of pixels averaged, got {data.shrink}."
        )
    if data.per_class is not None and (data.long_tail is None or data.per_class < 1):
        raise MixerError(
            "config: data.per_class is the largest class of data.long_tail, at least 1; got "
            + f"data.per_class={data.per_class} with data.long_tail={data.long_tail}; data.long_tail=1 keeps as many "
            + "images of each class."
        )


def check_tau(data: ImageDataConfig) -> None:
    """Refuse a scale that is out of range, or of a loss that has none."""
    if not 0 <= data.loss_tau < math.inf:
        raise MixerError(f"config: data.loss_tau must be finite and >= 0, got {data.loss_tau}.")
    if data.loss_tau != 1 and data.loss not in BALANCED:
        raise MixerError(
            f"config: data.loss_tau={data.loss_tau} belongs to data.loss {' or '.join(map(repr, BALANCED))}, got "
            + f"{data.loss!r}."
        )
