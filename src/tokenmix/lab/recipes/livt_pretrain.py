"""LiVT's first stage (arXiv 2212.02015): a ViT learns from the images of a long-tailed set as a masked autoencoder.

``livt_cifar10_lt`` starts from its runs (``--train.init RUN``): at ``smoke`` and ``gpu`` the encoders are those of its
models, on the images it trains on. ``paper``: what LiVT prints for ImageNet-LT, whose folder ``--data`` names: ViT-B/16
and 8 x 512 blocks of the decoder, 75 % hidden, 800 epochs of batch 4096, a rate of 1.5e-4 for each 256 images of it.
There is no class token, since LiVT classifies by the mean over patches.
"""

from __future__ import annotations

from dataclasses import replace

from ...models import ViTConfig, masked_autoencoder
from ...models.named import BASE
from ...types import Options
from ..data.augment import Augment
from ..data.long_tail import long_tail_counts
from ..train import ImageDataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig
from .aft_cifar10_classify import ROWS as CLASSIFY
from .images import CIFAR_IMAGES, CIFAR_MEAN, CIFAR_STD, ImageRow, shrink
from .livt_cifar_lt import IMBALANCE, MODELS
from .recipe import Recipe

IMAGENET_LT_IMAGES = 115_846
BATCH, EPOCHS, WARMUP, RATE = 4096, 800, 40, 1.5e-4  # of the paper; the rate is that of 256 images
OTHERS = ("aft_full", "aft_simple", "external")

ROWS = {
    **{name.rstrip("/") or "attention": ImageRow(about, model) for name, (about, model) in MODELS.items()},
    **{name: CLASSIFY[name] for name in OTHERS},
}


def decoder(dim: int, layers: int, heads: int) -> Options:
    """Return the fields of a decoder with softmax attention."""
    return {"decoder_dim": dim, "decoder_layers": layers, "decoder_mixers": ({"name": "attention", "heads": heads},)}


def base(vit: ViTConfig) -> ViTConfig:
    """Return ViT-B/16 at 224 pixels with the mixers of a row, the mean of the patches, and MAE's sinusoids."""
    spec = vit.mixers[0] | ({"heads": 12} if vit.mixers[0]["name"] == "attention" else {})
    positions = None if vit.positions is None else "sinusoidal"
    return replace(BASE, mixers=(spec,), pool="mean", positions=positions)


def build(row: ImageRow, size: str) -> RunConfig:
    """Return the config of a row at a size, with LiVT's optimiser."""
    often: Options = {"log_every": 100, "save_every": 1000, "eval_batch": 256}
    if size == "smoke":
        model = replace(masked_autoencoder(shrink(row.model)), **decoder(32, 2, 2))
        data = ImageDataConfig(source="digits", long_tail=IMBALANCE, augment=Augment(crop="pad", pad=1))
        optim = OptimConfig(lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05, warmup=100, min_lr_ratio=0.0, clip=0.0)
        loop = TrainConfig(steps=1500, batch_size=64, **{**often, "eval_every": 500, "eval_batch": 128})
        return RunConfig(model, data, optim, loop)
    if size == "paper":
        model = replace(masked_autoencoder(base(row.model)), **decoder(512, 8, 16))
        data = ImageDataConfig(source="imagenet", augment=Augment(crop="resized", flip=0.5))
        images, batch, epochs, warmup = IMAGENET_LT_IMAGES, BATCH, EPOCHS, WARMUP
    else:
        model = replace(masked_autoencoder(row.model), **decoder(96, 4, 3))
        augment = Augment(crop="resized", flip=0.5)
        data = ImageDataConfig(
            source="cifar10", valid=0.1, long_tail=IMBALANCE, augment=augment, mean=CIFAR_MEAN, std=CIFAR_STD
        )
        images, batch, epochs, warmup = sum(long_tail_counts(CIFAR_IMAGES * 9 // 100, 10, IMBALANCE)), 256, 400, 40
    epoch = images // batch
    optim = OptimConfig(
        lr=RATE * batch / 256,
        betas=(0.9, 0.95),
        weight_decay=0.05,
        warmup=warmup * epoch,
        min_lr_ratio=0.0,
        clip=0.0,
    )
    precision = "bf16" if size == "gpu" else "fp32"
    loop = TrainConfig(steps=epochs * epoch, batch_size=batch, precision=precision, eval_every=10 * epoch, **often)
    return RunConfig(model, data, replace(optim, **row.optim), replace(loop, **row.train))


RECIPE = Recipe(
    "livt_pretrain",
    "masked pretraining of a ViT on long-tailed images (MAE, LiVT's first stage); livt_cifar10_lt starts from it",
    ROWS,
    "attention",
    build,
)
