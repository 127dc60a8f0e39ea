"""Long-tailed CIFAR (LiVT, arXiv 2212.02015): the losses for classes of unequal size, imbalance factor 100.

The paper trains on ImageNet-LT, iNaturalist and Places-LT, after masked pretraining, which is not done here. This is
its loss, and those it is compared with, on the ViTs of ``aft_cifar10_classify`` from random weights. ``paper`` trains
on exactly the images of the papers, 12,406 and 10,847, which leaves none to validate on: validation is the test split.
``gpu`` holds a tenth out first. ``smoke``: the digits of scikit-learn, largest class 142 images, smallest 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..data.long_tail import long_tail_counts
from ..train import ImageDataConfig
from ..train.config import RunConfig
from .aft_cifar10_classify import ATTENTION, AUGMENT, HYDRA, conv, vit
from .images import CIFAR_IMAGES, CIFAR_MEAN, CIFAR_STD, ImageRow, digits_training, imagenet_like
from .recipe import Recipe

IMBALANCE = 100.0
MODELS = {
    "": ("ViT with softmax attention", ATTENTION),
    "aft_conv/": ("AFT with filters of 7 x 7", vit(conv(7), positions=None)),
    "hydra/": ("Hydra attention", vit(HYDRA)),
}
LOSSES = {
    "cross_entropy": "cross-entropy",
    "balanced_cross_entropy": "cross-entropy with the logarithms of the classes' shares added to the logits",
    "bce": "binary cross-entropy of each class",
    "class_balanced_bce": "binary cross-entropy, rare classes weighted up",
    "balanced_bce": "LiVT's loss: binary cross-entropy with the log-odds of the classes' shares added",
}


@dataclass(frozen=True)
class LossRow(ImageRow):
    """One experiment with its loss."""

    loss: str = "cross_entropy"


ROWS = {
    f"{name}{loss}": LossRow(f"{what}; {about}", model, loss=loss)
    for name, (what, model) in MODELS.items()
    for loss, about in LOSSES.items()
    if not name or loss in ("cross_entropy", "balanced_bce")
}


def long_tailed_digits(row: LossRow) -> RunConfig:
    """Return the row as a tiny model on digits whose largest class has 142 images and whose smallest has one."""
    return digits_training(row).override({"data.long_tail": IMBALANCE, "data.loss": row.loss})


def of_classes(classes: int) -> Callable[[LossRow, str], RunConfig]:
    """Return the function that builds the rows for CIFAR with this many classes."""

    def build(row: LossRow, size: str) -> RunConfig:
        """Return the config of a row: AdamW with LiVT's betas and last rate, 200 epochs (``gpu``) or 400."""
        if size == "smoke":
            return long_tailed_digits(row)
        batch, epochs, held_out = (256, 400, 0.0) if size == "paper" else (256, 200, 0.1)
        largest = round(CIFAR_IMAGES * (1 - held_out)) // classes
        data = ImageDataConfig(
            source=f"cifar{classes}",
            valid=held_out,
            long_tail=IMBALANCE,
            loss=row.loss,
            augment=AUGMENT,
            smoothing=0.1,
            mean=CIFAR_MEAN,
            std=CIFAR_STD,
        )
        images = sum(long_tail_counts(largest, classes, IMBALANCE))
        model = replace(row.model, classes=classes, drop_path=0.1)
        config = imagenet_like(row, model, data, images, batch, epochs, size)
        optim = replace(
            config.optim, betas=(0.9, 0.99), warmup=10 * (images // batch), min_lr_ratio=1e-6 / config.optim.lr
        )
        return replace(config, optim=optim)

    return build


RECIPES = tuple(
    Recipe(
        f"livt_cifar{classes}_lt",
        f"long-tailed CIFAR-{classes}, imbalance 100: balanced binary cross-entropy (LiVT) and other losses",
        ROWS,
        "balanced_bce",
        of_classes(classes),
    )
    for classes in (10, 100)
)
