"""The config of images with masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...errors import MixerError
from ...system.config import Json
from ..data.augment_masks import MaskAugment
from ..data.bounds import MAX_PIXELS


@dataclass(frozen=True)
class MaskDataConfig(Json):
    """Images with masks of classes, for a segmentation model.

    Args:
        source: "scenes" (synthetic, the default), or a folder of images/ and masks/; see ``data.open_masks``. None: to
            be given (``--data``).
        scenes: training scenes, at least 10; a tenth as many are for validation, and as many for the test. They have
            the model's image size.
        valid: share of the images of a folder without splits that is held out for validation, and again for the test,
            above 0 and below 0.5.
        ignore: label in masks of pixels that are neither learned nor scored; None: every label is a class.
        first_label: label in masks of the first class, 0 or more (ADE20K: 1, with 0 ignored).
        empty_classes: accept classes without a pixel in the training masks.
        turn_masks: whether masks are turned as the EXIF orientation of their image says, being drawn on the image as it
            is stored (true), or were drawn on the upright image (false); None: told by the sizes, or refused.
        augment: what happens to training images and masks.
        mean, std: of each channel, for normalisation; None: ImageNet's for 3 channels, 0.5 for grey.
        max_pixels: most pixels of an image file.
    """

    source: str | None = "scenes"
    scenes: int = 2000
    valid: float = 0.1
    ignore: int | None = 255
    first_label: int = 0
    empty_classes: bool = False
    turn_masks: bool | None = None
    augment: MaskAugment = field(default_factory=MaskAugment)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    max_pixels: int = MAX_PIXELS
    kind: ClassVar[str] = "masks"


def check_masks(data: MaskDataConfig, model: Any) -> None:
    """Refuse options of images with masks that are out of range."""
    if not 0 < data.valid < 0.5:
        raise MixerError(f"config: data.valid must be above 0 and below 0.5, got {data.valid}.")
    if data.first_label < 0 or (data.ignore is not None and data.ignore < 0):
        raise MixerError(
            f"config: data.first_label and data.ignore must be 0 or more, got {data.first_label} and {data.ignore}."
        )
    if data.scenes < 10:
        raise MixerError(f"config: data.scenes must be at least 10, got {data.scenes}.")
    if model.classes < 2:
        raise MixerError(f"config: model.head.classes must be at least 2, got {model.classes}.")
