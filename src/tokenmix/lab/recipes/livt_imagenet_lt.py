"""LiVT's second stage on ImageNet-LT (arXiv 2212.02015): ViT-B/16 learns classes of unequal size from its pretraining.

``--data`` names the folder of the set, 115,846 training images, and ``--train.init`` a run of ``livt_pretrain`` at size
``paper``. ``paper`` is as printed: 100 epochs of batch 1024, 10 of warm-up, a rate of 1e-3, by a cosine to 1e-6,
AdamW with betas 0.9 and 0.99, weight decay 0.05, layer decay 0.75, drop path 0.1, label smoothing 0.1, RandAugment,
mixup, CutMix and erasing. ``gpu``: the same with batch 256 at a quarter of the rate, in bf16. ``smoke``: that of
``livt_cifar10_lt``.
"""

from __future__ import annotations

from dataclasses import replace

from ..data.augment import Augment
from ..train import ImageDataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig
from .livt_cifar_lt import ROWS, LossRow, long_tailed_digits
from .livt_pretrain import IMAGENET_LT_IMAGES, base
from .recipe import Recipe

CLASSES = 1000
BATCH, EPOCHS, WARMUP, RATE, LAST_RATE = 1024, 100, 10, 1e-3, 1e-6
AUGMENT = Augment(crop="resized", flip=0.5, randaugment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0)


def build(row: LossRow, size: str) -> RunConfig:
    """Return the config of a row at a size."""
    if size == "smoke":
        return long_tailed_digits(row)
    batch = BATCH if size == "paper" else BATCH // 4
    epoch, rate = IMAGENET_LT_IMAGES // batch, RATE * batch / BATCH
    optim = OptimConfig(
        lr=rate,
        betas=(0.9, 0.99),
        weight_decay=0.05,
        layer_decay=0.75,
        warmup=WARMUP * epoch,
        min_lr_ratio=LAST_RATE / RATE,
        clip=0.0,
    )
    loop = TrainConfig(
        steps=EPOCHS * epoch,
        batch_size=batch,
        precision="bf16" if size == "gpu" else "fp32",
        log_every=100,
        eval_every=epoch,
        save_every=1000,
        eval_batch=256,
    )
    data = ImageDataConfig(source="imagenet", augment=AUGMENT, smoothing=0.1, loss=row.loss)
    return RunConfig(replace(base(row.model), classes=CLASSES, drop_path=0.1), data, optim, loop)


RECIPE = Recipe(
    "livt_imagenet_lt",
    "long-tailed ImageNet: LiVT's second stage, balanced binary cross-entropy and other losses on ViT-B/16",
    ROWS,
    "balanced_bce",
    build,
)
