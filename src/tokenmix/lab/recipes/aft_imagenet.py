"""AFT in the DeiT architecture on ImageNet-1k (AFT, arXiv 2105.14103, Sec. 5.3): the rows of Tables 7 and 8.

Table 8 fine-tunes from DeiT-base at 384: first convert the checkpoint (``tokenmix convert``), then give the directory
as ``--train.init``. ImageNet itself cannot be downloaded: give its folder (train/CLASS/*, val/CLASS/*) as ``--data``.

``smoke`` has patches of one pixel, so that its 8 x 8 patches hold filters of 15 x 15, and a sixth of the width; rows
with more heads than that, or images of 384, do not run there.
"""

from __future__ import annotations

from dataclasses import replace

from ...models import MODELS
from ..data.augment import Augment
from ..train import ImageDataConfig
from ..train.config import RunConfig
from .images import DEIT_AUGMENT, IMAGENET_IMAGES, ImageRow, deit_training, imagenet_like
from .recipe import Recipe

PRINTED = {  # model: (top-1 %, parameters in millions, images per second, GB), inference on one V100 at batch 256
    "deit_tiny": (72.2, 5.7, 2507, 1.9),
    "deit_small": (79.9, 22.1, 1010, 2.9),
    "lambda_tiny": (72.4, 4.8, 2157, 2.7),
    "lambda_small": (80.0, 17.7, 1057, 5.8),
    "aft_full_tiny": (72.4, 6.3, 2523, 1.8),
    "aft_full_small": (79.8, 22.6, 1011, 2.6),
    "aft_conv_tiny_k11_h32": (73.9, 5.4, 2359, 1.8),
    "aft_conv_tiny_k11_h192": (74.8, 5.9, 2365, 2.2),
    "aft_conv_small_k11_h16": (80.2, 20.3, 989, 2.5),
    "aft_conv_small_k11_h384": (80.8, 22.5, 936, 3.2),
    "aft_conv_small_k15_h384": (81.0, 23.0, 936, 3.2),
}
SIDE, NARROW = ("image_size",), 6
TABLE8 = {
    "deit_base_384": (82.9, 86.9, 89.6, 13.6),
    "finetuned": (83.4, 79.7, 98.5, 8.9),
    "random": (81.6, 79.7, 98.5, 8.9),
}


def rows() -> dict[str, ImageRow]:
    """Return every row by name."""
    found = {
        f"table7/{name}": ImageRow(
            f"Table 7: {name}, 224",
            MODELS[name],
            _printed_numbers(numbers),
            keeps=("kernel_size", "heads") if name.startswith("aft_conv") else (),
        )
        for name, numbers in PRINTED.items()
    }
    base, conv = MODELS["deit_base_384"], MODELS["aft_conv_base384_k25_h32"]
    found["table8/deit_base_384"] = ImageRow(
        "Table 8: DeiT-base at 384", base, _printed_numbers(TABLE8["deit_base_384"]), keeps=SIDE
    )
    found["table8/aft_conv_finetuned"] = ImageRow(
        "Table 8: AFT-conv from DeiT-base's weights (--train.init)",
        conv,
        _printed_numbers(TABLE8["finetuned"]),
        keeps=SIDE,
    )
    found["table8/aft_conv_random"] = ImageRow(
        "Table 8: AFT-conv from random weights", conv, _printed_numbers(TABLE8["random"]), keeps=SIDE
    )
    return found


def _printed_numbers(numbers: tuple[float, float, float, float]) -> dict[str, float]:
    return dict(zip(("top1", "parameters_m", "images_per_s", "gb"), numbers, strict=True))


def build(row: ImageRow, size: str) -> RunConfig:
    """Return the config of a row at a size: DeiT's recipe; for Table 8, 100 epochs of batch 64, as printed."""
    if row.model.image_size != (384, 384) or size == "smoke":
        return deit_training(row, size, patch=1, dim=row.model.dim // NARROW)
    augment = DEIT_AUGMENT if size == "paper" else Augment(crop="resized", flip=0.5)
    model = replace(row.model, drop_path=0.1)
    data = ImageDataConfig(source="imagenet", augment=augment, smoothing=0.1)
    return imagenet_like(row, model, data, IMAGENET_IMAGES, 64, 100 if size == "paper" else 10, size)


RECIPE = Recipe(
    "aft_imagenet",
    "AFT-full and AFT-conv in the DeiT architecture: Tables 7 and 8 of the AFT paper",
    rows(),
    "table7/aft_conv_tiny_k11_h32",
    build,
    {"table8/aft_conv_random": "table8/aft_conv_finetuned"},  # which starts from --train.init
)
