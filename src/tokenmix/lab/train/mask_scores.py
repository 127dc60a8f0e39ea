"""Scores of semantic segmentation: IoU of each class, its mean, and accuracies, from one confusion matrix."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..data.pair_sampler import IGNORED


@dataclass(frozen=True)
class MaskScore:
    """The scores of a segmentation model on ``images`` images, from counts of pixels summed over all of them.

    Attributes:
        miou: mean of ``iou`` over its classes.
        pixel_accuracy: share of pixels whose class is right.
        class_accuracy: mean over the classes that occur of the share of their pixels that is right.
        cross_entropy: mean cross-entropy of a pixel in nats.
        pixels: pixels that were scored; those to be ignored are not.
        iou: intersection over union of each class, by name; classes that occur neither in the masks nor in the
            predictions have none and are left out.
    """

    miou: float
    pixel_accuracy: float
    class_accuracy: float
    cross_entropy: float
    images: int
    pixels: int
    image_size: tuple[int, int]
    seconds: float = 0.0
    iou: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        size = " x ".join(str(n) for n in self.image_size)
        whole = (
            f"{100 * self.miou:.2f} % mIoU, {100 * self.pixel_accuracy:.2f} % of pixels right, cross-entropy "
            + f"{self.cross_entropy:.4f} over {self.images:,} images of {size}"
        )
        return whole + "; IoU: " + ", ".join(f"{name} {100 * iou:.1f} %" for name, iou in self.iou.items())


def confusion_matrix(predicted: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Count pixels by their true class (rows) and their predicted class (columns), int64 (classes, classes).

    Pixels whose true class is ``IGNORED`` are not counted.
    """
    counted = truth != IGNORED
    pairs = truth[counted] * classes + predicted[counted]
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def intersection_over_union(confusion: Tensor) -> Tensor:
    """Compute the IoU of each class, float64 (classes,): n_cc / (sum_j n_cj + sum_j n_jc - n_cc).

    n_ij is the number of pixels of class i that were taken for class j (Long et al. 2015, arXiv 1411.4038, Sec. 5). A
    class without a pixel in either is NaN.
    """
    right = confusion.diagonal().double()
    return right / (confusion.sum(0) + confusion.sum(1) - confusion.diagonal())


def accuracies(confusion: Tensor) -> tuple[float, float]:
    """Compute the share of pixels that is right, and the mean of that share over the classes that occur."""
    right, there = confusion.diagonal().double(), confusion.sum(1)
    return float(right.sum() / there.sum()), float((right / there).nanmean())
