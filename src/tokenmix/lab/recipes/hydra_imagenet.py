"""Hydra attention in DeiT-B on ImageNet-1k (Hydra, arXiv 2209.07484).

The rows vary which layers to replace (Fig. 4), how many heads there are (Fig. 2), and the kernel. The paper trains with
DeiT's recipe. Its text does not give the figures' numbers. From an independent training with the same recipe (EasyCV),
the top-1 accuracy is known with Hydra in all layers, in the last eight, and in none.

``smoke`` keeps what a row's name says: the rows about layers have all 12 of them, 48 features wide, those about heads 4
layers of 96 features, which hold up to 96 heads.
"""

from __future__ import annotations

from dataclasses import replace

from ...models import MODELS, replace_layers
from ..train.config import RunConfig
from .images import ImageRow, deit_training
from .recipe import Recipe

BASE = MODELS["deit_base"]
HYDRA = {"name": "hydra"}
EASYCV = {0: 81.756, 8: 79.444, 12: 76.67}
LINEAR_HEADS = (1, 2, 3, 4, 6, 12, 24, 48, 96, 192, 384, 768)
SOFTMAX_HEADS = (1, 2, 3, 4, 6, 12, 24, 48, 96)
KERNELS = ("cosine", "tanh", "sigmoid", "elu", "identity", "mean", "softmax", "sigmoid/softmax")


def rows() -> dict[str, ImageRow]:
    """Return every row by name."""
    found = {}
    for last in range(13):
        printed = {"top1_easycv": EASYCV[last]} if last in EASYCV else {}
        found[f"fig4/last_{last}"] = ImageRow(
            f"Fig. 4: Hydra in the last {last} layers",
            replace_layers(BASE, HYDRA, last=last),
            printed,
            keeps=("layers",),
        )
    for every in (2, 3, 4, 6):
        found[f"fig4/every_{every}"] = ImageRow(
            f"Fig. 4: Hydra in one layer of {every}, interleaved",
            replace_layers(BASE, HYDRA, every=every),
            keeps=("layers",),
        )
    for heads in LINEAR_HEADS:
        spec = {"name": "multihead_linear", "heads": heads}
        found[f"fig2/linear_{heads}_heads"] = ImageRow(
            f"Fig. 2: linear attention, cosine kernel, {heads} heads", replace(BASE, mixers=(spec,)), keeps=("heads",)
        )
    for heads in SOFTMAX_HEADS:
        spec = {"name": "attention", "heads": heads}
        found[f"fig2/softmax_{heads}_heads"] = ImageRow(
            f"Fig. 2: softmax attention, {heads} heads", replace(BASE, mixers=(spec,)), keeps=("heads",)
        )
    for kernel in KERNELS:
        spec = {"name": "hydra", "feature": kernel}
        name = kernel.replace("/", "_")
        found[f"kernel/{name}"] = ImageRow(
            f"Hydra with the kernel {kernel} in the last two layers",
            replace_layers(BASE, spec, last=2),
            keeps=("layers",),
        )
    return found


def build(row: ImageRow, size: str) -> RunConfig:
    """Return the config of a row at a size, with DeiT's recipe."""
    return deit_training(row, size, **({"layers": 12, "dim": 48} if "layers" in row.keeps else {"dim": 96}))


RECIPE = Recipe(
    "hydra_imagenet",
    "Hydra attention in DeiT-B: layers (Fig. 4), heads (Fig. 2), kernels",
    rows(),
    "fig4/last_2",
    build,
    {
        "fig2/softmax_12_heads": "fig4/last_0",
        "fig2/linear_768_heads": "fig4/last_12",
        "kernel/cosine": "fig4/last_2",
    },
)
