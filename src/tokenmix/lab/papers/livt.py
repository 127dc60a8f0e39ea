"""LiVT: learning imbalanced data with Vision Transformers."""

from __future__ import annotations

from typing import cast

import torch

from .claim import Claim, Measure, Number, Paper, Trial, stated
from .identities import compared, drawn
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
    """Return a measure of the images of all classes together."""

    def measure() -> int:
        from ..data.long_tail import long_tail_counts

        return sum(long_tail_counts(most, classes, factor))

    return measure


def balanced_bce() -> str:
    """Compare the loss with the equation, on soft targets."""
    from ..train.class_losses import ClassLoss

    counts, z, y = [500, 60, 9, 1], drawn(6, 4), drawn(6, 4, seed=1).softmax(1)
    pi = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    p = (z + pi.log() - (1 - pi).log()).sigmoid()
    written = -(y * p.log() + (1 - y) * (1 - p).log()).sum(1).mean()
    return compared(ClassLoss("balanced_bce", counts)(z, y), written)


def pretraining() -> str:
    """Return epochs, share of hidden patches, and width and layers of the decoder of our recipe."""
    from ...models import MAEConfig
    from ..recipes import RECIPES
    from ..recipes.livt_pretrain import IMAGENET_LT_IMAGES

    config = RECIPES["livt_pretrain"].config(size="paper")
    loop, model = config.train, cast(MAEConfig, config.model)
    epochs = (loop.steps or 0) // (IMAGENET_LT_IMAGES // loop.batch_size)
    return f"{epochs} / {model.mask_ratio} / {model.decoder_dim} x {model.decoder_layers}"


def balanced_training() -> str:
    """Return epochs and layer decay of our recipe for the second stage."""
    from ..recipes import RECIPES
    from ..recipes.livt_pretrain import IMAGENET_LT_IMAGES

    config = RECIPES["livt_imagenet_lt"].config(size="paper")
    epochs = (config.train.steps or 0) // (IMAGENET_LT_IMAGES // config.train.batch_size)
    return f"{epochs} / {config.optim.layer_decay}"


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
            (Number("our loss against the equation", "equal", measure=balanced_bce),),
            "z_c + tau (log pi_c - log(1 - pi_c)), pi_c = n_c / sum n",
            "lab.train.class_losses.ClassLoss",
        ),
        Claim(
            "CIFAR-LT sets",
            "The classes of the long-tailed CIFAR sets shrink exponentially.",
            tuple(Number(name, printed, "", total(*numbers), OFFICIAL) for name, printed, *numbers in TOTALS),
            "n_c = floor(n_max factor^(-c / (C - 1)))",
            "lab.data.long_tail.long_tail_counts",
        ),
        Claim("Other sets", "Sizes of the other long-tailed sets.", trained(sets, source=OFFICIAL, built=False)),
        Claim(
            "Results of ViT-B",
            "A ViT that is first trained to fill in masked patches and then with the balanced loss: top-1 on frequent, "
            "medium, rare and all classes.",
            trained(results, "%", source=OFFICIAL),
            "",
            "models.mae.MAE",
            small="vision.md#heads-slots-and-long-tails",
            trials=(
                Trial("cifar10_lt", "attention, balanced_bce", "better", "attention, cross_entropy"),
                Trial("cifar10_lt", "attention, balanced_bce", "better", "attention, bce"),
            ),
        ),
        Claim(
            "Recipe",
            "800 epochs of masked pretraining (mask 0.75, decoder of 8 x 512), then 100 of the balanced loss (30 on "
            "Places-LT) at a layer decay of 0.75, tau 1 (1.05 on Places-LT; the released code always uses 1).",
            (
                Number("pretraining: epochs, mask, decoder", "800 / 0.75 / 512 x 8", "", stated(pretraining), OFFICIAL),
                Number("balanced loss: epochs, layer decay", "100 / 0.75", "", stated(balanced_training), OFFICIAL),
            ),
            "",
            "lab.recipes.livt_imagenet_lt",
        ),
    )


PAPER = Paper("livt", "Learning Imbalanced Data with Vision Transformers", "Xu et al. 2023", "2212.02015", state)
