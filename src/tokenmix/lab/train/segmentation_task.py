"""Semantic segmentation: a class for every pixel, scored by mean intersection over union."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...models.images import both_sides
from ...models.segmentation import on_grid
from ..data.augment_masks import MaskAugment, MaskSampler, mask_batches, resize_pair
from ..data.bounds import MAX_PIXELS
from ..data.masks import MASK_SETS, MaskData, open_masks, paint_mask
from ..data.pair_sampler import IGNORED
from .config import RunConfig
from .image_tasks import ImageTask, write_grid
from .mask_scores import MaskScore, accuracies, confusion_matrix, intersection_over_union
from .registry import TaskData
from .task import record_seconds


@dataclass(frozen=True)
class MaskDataConfig(TaskData):
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


class SegmentationTask(ImageTask):
    """Train a model of the class of every pixel.

    The loss is the mean over the pixels of a batch that have a class of -log softmax(z)[c].
    """

    config = MaskDataConfig
    models = ("segmentation",)
    movable = ("source", "max_pixels")
    sets = MASK_SETS
    downloads = ()
    scored = ("data.source", "data.valid", "train.eval_images")
    reads_with: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {}
    metric = "miou"
    higher = True
    options = ("image_size", "max_images")
    outputs, places = "classes", 2

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        classes = len(self.images.classes)
        if self.model.classes != classes:
            raise MixerError(
                f"config: model.head.classes={self.model.classes}, but {self.images.name} has {classes} classes; "
                + f"set model.head.classes={classes}."
            )
        self.check_samples()
        self.sampler = MaskSampler(
            self.images.split("train"), image_size=self.model.image_size, **self.pixels, **self.sampler_options
        )

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse options of images with masks that are out of range."""
        data, model = cast(Any, config.data), cast(Any, config.model)
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

    @classmethod
    def match(cls, config: RunConfig) -> RunConfig:
        return config.override({"model.head.classes": len(open_mask_set(config.data, config.model).classes)})

    def open_images(self) -> MaskData:
        return open_mask_set(self.data, self.model)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.prepared_batch(step)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        nats = F.cross_entropy(outputs.float(), targets, ignore_index=IGNORED, reduction="sum")
        return nats / self.count_targets(targets)

    def count_targets(self, targets: Tensor) -> int:
        return max(int((targets != IGNORED).sum()), 1)  # a batch without a class has a loss of 0

    @record_seconds
    def evaluate(
        self,
        model: nn.Module,
        split: str,
        *,
        image_size: int | tuple[int, int] | None = None,
        max_images: int | None = None,
    ) -> MaskScore:
        """Score the model on a split.

        Images are resized to the model's size, and logits back to that of each mask, so that every pixel of the mask
        counts once. Pixels are counted over all images before anything is divided.

        Args:
            image_size: size to which test images are resized, for models that accept sizes they were not trained on;
                None: the training size.
            max_images: evaluate on the first ``max_images`` images; None: all of them.
        """
        size = both_sides(self.model.image_size if image_size is None else image_size, "eval: image_size")
        classes, nats, n = self.model.classes, 0.0, 0
        confusion = torch.zeros(classes, classes, dtype=torch.int64)
        for logits, truth in self._predictions(model, split, size, max_images):
            confusion += confusion_matrix(logits.argmax(0), truth, classes).cpu()
            nats += float(F.cross_entropy(logits[None], truth[None], ignore_index=IGNORED, reduction="sum").double())
            n += 1
        pixels = int(confusion.sum())
        if not pixels:
            raise MixerError(f"masks {self.images.name}: no pixel of the first {n} masks of {split} has a class.")
        iou = intersection_over_union(confusion)
        by_name = {c: float(x) for c, x in zip(self.images.classes, iou, strict=True) if not x.isnan()}
        of_pixels, of_classes = accuracies(confusion)
        return MaskScore(float(iou.nanmean()), of_pixels, of_classes, nats / pixels, n, pixels, size, iou=by_name)

    def _predictions(
        self, model: nn.Module, split: str, size: tuple[int, int], limit: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits (classes, H, W) and mask (H, W) of each image, at the size of its mask."""
        options = {"batch_size": self.train.eval_batch, "image_size": size, "channels": self.model.channels}
        batches = mask_batches(self.images.split(split), limit=limit, **options, **self.pixels)
        for found, masks in self.answers(model, batches):
            for logits, mask in zip(found.float(), masks, strict=True):
                yield on_grid(logits[None], mask.shape)[0], mask.to(logits.device)

    @torch.no_grad()
    def sample(self, model: nn.Module, folder: Path, step: int) -> None:
        """Write a picture of three rows: the first validation images, their masks, and what the model predicts.

        Each class has the colour of ``data.masks.colour_of``; pixels to be ignored are white.
        """
        n = min(self.train.samples, len(self.images.split("valid")))
        if not n:
            return
        size = both_sides(self.model.image_size, "sample")
        read = self.images.split("valid").read
        pairs = [resize_pair(image, mask, size) for image, mask in map(read, range(n))]
        found = [logits.argmax(0).cpu() for logits, _ in self._predictions(model, "valid", size, n)]
        predicted = [resize_pair(pairs[0][0], labels, size)[1] for labels in found]
        masks = torch.stack([mask for _, mask in pairs] + predicted)
        images = torch.stack([image for image, _ in pairs])
        scale = max(256 // max(size), 1)
        write_grid(
            folder / f"step_{step:08d}.png",
            torch.cat([images, paint_mask(masks, self.model.classes)]),
            columns=n,
            scale=min(scale, 4),
        )


def open_mask_set(data: Any, model: Any) -> MaskData:
    """Open the images and masks of a config."""
    if data.source is None:
        raise MixerError(
            "config: this recipe needs images with masks of your own; give their folder, of images/ and masks/, as "
            + "--data PATH, or data.source='scenes' for synthetic ones."
        )
    return open_masks(
        data.source,
        size=both_sides(model.image_size, "masks"),
        scenes=data.scenes,
        valid=data.valid,
        ignore=data.ignore,
        first_label=data.first_label,
        empty_classes=data.empty_classes,
        turn_masks=data.turn_masks,
        max_pixels=data.max_pixels,
    )
