"""timm's metadata of our models."""

from __future__ import annotations

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from ...models import PyramidConfig, ViTConfig
from ...types import Options


def describe_model(
    config: ViTConfig | PyramidConfig, *, first_conv: str, pool_size: tuple[int, int] | None, crop_pct: float
) -> Options:
    """Return timm's metadata of a model: the preprocessing of images, and the names of its first and last layer.

    There are no weights to download.
    """
    return {
        "num_classes": config.classes,
        "input_size": (config.channels, *config.image_size),
        "pool_size": pool_size,
        "fixed_input_size": True,
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_conv,
        "classifier": "head",
        "license": "apache-2.0",
    }
