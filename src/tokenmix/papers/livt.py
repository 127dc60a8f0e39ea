"""LiVT: learning imbalanced data with Vision Transformers. Its loss and its sets are not built yet."""

from __future__ import annotations

import math

from .claim import Claim, Measure, Number, Paper
from .rows import trained

OFFICIAL = "official code"
TOTALS = (
    ("CIFAR-10-LT, factor 100", "12,406", 10, 5000, 100),
    ("CIFAR-10-LT, factor 10", "20,431", 10, 5000, 10),
    ("CIFAR-100-LT, factor 100", "10,847", 100, 500, 100),
    ("CIFAR-100-LT, factor 10", "19,573", 100, 500, 10),
)
"""Rows: name, images as printed, classes, images of the largest class, imbalance factor."""


def total(classes: int, most: int, factor: float) -> Measure:
    """Sum the images of the classes, floor(most factor^(-c / (classes - 1))) of class c."""
    return lambda: sum(math.floor(most * factor ** (-c / (classes - 1)) + 1e-9) for c in range(classes))


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    sets = {
        "ImageNet-LT: images, classes, most, least": "115,846 / 1,000 / 1,280 / 5",
        "ImageNet-BAL: images, in each class": "160,000 / 160",
        "iNat18: images, classes, most, least": "437,513 / 8,142 / 1,000 / 2",
        "Places-LT: images, classes, most, least": "62,500 / 365 / 4,980 / 5",
    }
    results = {
        "ImageNet-LT at 224": "73.6 / 56.4 / 41.0 / 60.9",
        "ImageNet-LT at 384": "76.4 / 59.7 / 42.7 / 63.8",
        "iNat18 at 224": "78.9 / 76.5 / 74.8 / 76.1",
        "iNat18 at 384": "83.2 / 81.5 / 79.7 / 81.0",
    }
    return (
        Claim(
            "Balanced binary cross-entropy",
            "In training, each class's logit is shifted by the log of its odds among the images; testing uses the "
            "logits as they are.",
            trained({"the loss": "an equation"}, built=False),
            "z_c + tau (log pi_c - log(1 - pi_c)), pi_c = n_c / sum n",
        ),
        Claim(
            "CIFAR-LT sets",
            "The classes of the long-tailed CIFAR sets shrink exponentially. Ours is the sum of the formula; the sets "
            "themselves are not built yet.",
            tuple(Number(name, printed, "", total(*numbers), OFFICIAL) for name, printed, *numbers in TOTALS),
            "n_c = floor(n_max factor^(-c / (C - 1)))",
        ),
        Claim("Other sets", "Sizes of the other long-tailed sets.", trained(sets, source=OFFICIAL, built=False)),
        Claim(
            "Results of ViT-B",
            "A ViT that is first trained to fill in masked patches and then with the balanced loss: top-1 on frequent, "
            "medium, rare and all classes.",
            trained(results, "%", source=OFFICIAL, built=False),
        ),
        Claim(
            "Recipe",
            "800 epochs of masked pretraining (mask 0.75), then 100 of the balanced loss (30 on Places-LT) at a layer "
            "decay of 0.75, tau 1 (1.05 on Places-LT; the released code always uses 1).",
            trained({"epochs, mask, layer decay": "800 / 0.75 / 0.75"}, source=OFFICIAL, built=False),
        ),
    )


PAPER = Paper("livt", "Learning Imbalanced Data with Vision Transformers", "Xu et al. 2023", "2212.02015", state)
