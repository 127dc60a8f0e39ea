"""Pyramid Vision Transformers on ImageNet-1k (arXiv 2102.12122).

The rows are PVT's four sizes, and mixers of linear cost in place of its spatial reduction. The paper trains with DeiT's
recipe, drop path 0.1 and no clipping.
"""

from __future__ import annotations

from dataclasses import replace

from ...models import MODELS
from ...types import Options
from ..data.augment import Augment
from ..train import ImageDataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig
from .images import ImageRow, deit_training
from .recipe import Recipe

PRINTED = {
    "tiny": (75.1, 13.2),
    "small": (79.8, 24.5),
    "medium": (81.2, 44.2),
    "large": (81.7, 61.4),
}  # top-1 %, parameters in millions
OTHERS = {"hydra": {"name": "hydra"}, "aft_simple": {"name": "aft_simple"}, "linear": {"name": "linear", "heads": 1}}


def rows() -> dict[str, ImageRow]:
    """Return every row by name."""
    found = {
        name: ImageRow(f"PVT-{name}", MODELS[f"pvt_{name}"], {"top1": top1, "parameters_m": millions})
        for name, (top1, millions) in PRINTED.items()
    }
    for name, spec in OTHERS.items():
        found[f"tiny_{name}"] = ImageRow(
            f"PVT-tiny with {name} in every stage; ours", replace(MODELS["pvt_tiny"], mixers=(spec,))
        )
    return found


def build(row: ImageRow, size: str) -> RunConfig:
    """Return the config of a row at a size, with DeiT's recipe.

    ``smoke`` has the layers of the row, narrow, and digits enlarged to 64 x 64.
    """
    if size != "smoke":
        return deit_training(row, size)
    small: Options = {
        "dims": (16, 32, 40, 64),
        "image_size": (64, 64),
        "channels": 1,
        "classes": 10,
    }
    model = replace(
        row.model, **small, mixers=row.model.mixers if len(row.model.mixers) in (1, 4) else row.model.mixers[:1]
    )
    data = ImageDataConfig(source="digits", augment=Augment(crop="pad", pad=6))
    loop = TrainConfig(steps=200, batch_size=32, log_every=20, eval_every=100, save_every=100, eval_batch=64)
    return RunConfig(model, data, OptimConfig(lr=2e-3, weight_decay=0.05, warmup=40), loop)


RECIPE = Recipe(
    "pvt_imagenet", "Pyramid Vision Transformers: four sizes, and other mixers in their stages", rows(), "tiny", build
)
