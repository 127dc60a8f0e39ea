"""Classification of CIFAR-10 at 32 x 32: softmax attention against AFT, Hydra and External attention on the same
tokens, and a ResNet.

The experiment is ours; no paper prints it. ``gpu`` and ``paper``: 12 layers x 192 and patches of 2, hence 256 tokens;
100 and 300 epochs. ``smoke``: 4 layers x 64 on the digits of scikit-learn, 4 x 4 patches, which
filters of 11 x 11 exceed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...models import ResNetConfig, ViTConfig, replace_layers
from ...types import Spec
from ..data.augment import Augment
from ..train import ImageDataConfig
from ..train.config import RunConfig
from .images import CIFAR_IMAGES, CIFAR_MEAN, CIFAR_STD, DEIT_AUGMENT, ImageRow, digits_training, imagenet_like
from .recipe import Recipe

HEADS = 32
AUGMENT = Augment(crop="pad", pad=4, flip=0.5, randaugment="rand-m9-mstd0.5-inc1", erasing=0.25, mixup=0.8, cutmix=1.0)


def vit(*mixers: Spec, **options: Any) -> ViTConfig:
    """Return the common architecture with these mixers."""
    return ViTConfig(
        dim=192, layers=12, mixers=mixers, image_size=(32, 32), patch=2, classes=10, pool="mean", **options
    )


def conv(kernel_size: int, **options: object) -> Spec:
    """Return the spec of AFT-conv."""
    return {"name": "aft_conv", "heads": HEADS, "kernel_size": kernel_size, "qkv_bias": False, **options}


ATTENTION = vit({"name": "attention", "heads": 3})
SIGNED, WHOLE = {"filters": "signed"}, {"divide": False}
HYDRA = {"name": "hydra"}
RESNET = ResNetConfig(widths=(64, 96, 128), depths=(10, 9, 9))  # 1.30 G multiply-accumulates, as AFT-conv
ROWS = {
    "attention": ImageRow("softmax attention, the baseline", ATTENTION),
    "aft_full": ImageRow("AFT-full, factors of rank 128", vit({"name": "aft_full", "rank": 128, "qkv_bias": False})),
    "aft_simple": ImageRow("AFT-simple", vit({"name": "aft_simple"})),
    "aft_conv_k3": ImageRow("AFT-conv, 3 x 3", vit(conv(3), positions=None), keeps=("kernel_size",)),
    "aft_conv_k7": ImageRow("AFT-conv, 7 x 7", vit(conv(7), positions=None), keeps=("kernel_size",)),
    "aft_conv_k11": ImageRow("AFT-conv, 11 x 11", vit(conv(11), positions=None), keeps=("kernel_size",)),
    "aft_conv_k7_no_query": ImageRow("AFT-conv, 7 x 7, without the query", vit(conv(7, gate=None), positions=None)),
    "aft_conv_k7_raw": ImageRow(
        "AFT-conv, 7 x 7, filters without reparameterisation", vit(conv(7, reparam=False), positions=None)
    ),
    "aft_conv_k7_window": ImageRow(
        "AFT-conv, 7 x 7, nothing outside the window", vit(conv(7, outside="none"), positions=None)
    ),
    "aft_conv_k7_signed": ImageRow("AFT-conv, 7 x 7, signed filters", vit(conv(7, **SIGNED), positions=None)),
    "aft_conv_k7_no_division": ImageRow("AFT-conv, 7 x 7, no division", vit(conv(7, **WHOLE), positions=None)),
    "aft_conv_k7_depthwise": ImageRow(
        "AFT-conv, 7 x 7, signed, nothing outside the window, no division: a depthwise convolution",
        vit(conv(7, outside="none", **SIGNED, **WHOLE), positions=None),
    ),
    "hydra": ImageRow("Hydra attention in all layers", vit(HYDRA)),
    "hydra_last_quarter": ImageRow(
        "Hydra attention in the last quarter of the layers", replace_layers(ATTENTION, HYDRA, last=3)
    ),
    "hydra_last_half": ImageRow(
        "Hydra attention in the last half of the layers", replace_layers(ATTENTION, HYDRA, last=6)
    ),
    "resnet": ImageRow(
        "a ResNet of 58 layers, 64 to 128 channels: convolutions alone, about as many operations", RESNET
    ),
    "external": ImageRow("External attention, 64 slots", vit({"name": "external", "slots": 64})),
}


def build(row: ImageRow, size: str) -> RunConfig:
    """Return the config of a row at a size."""
    if size == "smoke":
        return digits_training(row)
    batch, epochs, augment = (256, 300, DEIT_AUGMENT) if size == "paper" else (256, 100, AUGMENT)
    augment = replace(augment, crop="pad", repeats=1)
    data = ImageDataConfig(source="cifar10", augment=augment, smoothing=0.1, mean=CIFAR_MEAN, std=CIFAR_STD)
    return imagenet_like(row, replace(row.model, drop_path=0.1), data, CIFAR_IMAGES, batch, epochs, size)


RECIPE = Recipe(
    "aft_cifar10_classify",
    "CIFAR-10 at 32 x 32: attention, AFT, Hydra and External attention on the same tokens",
    ROWS,
    "aft_conv_k7",
    build,
)
