"""Images by a diffusion transformer (DiT, arXiv 2212.09748) that follows a rectified flow: one row for each mixer.

EANet (arXiv 2105.02358) puts External attention into a GAN for its task of generation; here the task is the
same and the model a diffusion transformer, so no paper prints the scores of these rows.

``paper``: the size of DiT-B/2 and DiT's training (its Sec. 4): AdamW at a constant 1e-4 without decay, 400,000 steps of
batch 256, mirroring alone, an average of the weights with decay 0.9999, classes hidden in a tenth of the images. DiT
generates latents of ImageNet, 32 x 32 x 4; here they are the pixels of CIFAR-10, 32 x 32 x 3, so as many tokens.

``gpu``: DiT-S/2 on CIFAR-10 in bf16, 60,000 steps of batch 128. ``smoke``: 4 layers x 64 on the digits of scikit-learn.
The rates of both are ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...models import DiTConfig
from ...types import Options, Spec
from ..data.augment import Augment
from ..train import ImageDataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig
from .images import ImageRow, shrink
from .recipe import Recipe

ATTENTION = {"name": "attention", "heads": 12, "qk_norm": "rms"}
SMALL_DIM = 384


def dit(*mixers: Spec, **options: Any) -> DiTConfig:
    """Return DiT-B/2 on images of 32 x 32 with these mixers."""
    return DiTConfig(dim=768, layers=12, mixers=mixers, image_size=(32, 32), patch=2, classes=10, **options)


ROWS = {
    "attention": ImageRow("softmax attention, queries and keys normalised: the baseline", dit(ATTENTION)),
    "external": ImageRow("External attention, 64 slots", dit({"name": "external", "slots": 64})),
    "aft_simple": ImageRow("AFT-simple", dit({"name": "aft_simple"})),
    "aft_full": ImageRow("AFT-full, factors of rank 128", dit({"name": "aft_full", "rank": 128})),
    "aft_conv": ImageRow("AFT-conv, 7 x 7", dit({"name": "aft_conv", "heads": 32, "kernel_size": 7})),
    "hydra": ImageRow("Hydra attention", dit({"name": "hydra"})),
    "linear": ImageRow("linear attention", dit({"name": "multihead_linear", "heads": 12})),
}


def build(row: ImageRow, size: str) -> RunConfig:
    """Return the config of a row at a size."""
    if size == "smoke":
        return _smoke(row)
    optim = OptimConfig(lr=1e-4, weight_decay=0.0, schedule="constant", warmup=0, clip=0.0, ema=0.9999)
    often: Options = {"log_every": 100, "eval_every": 10_000, "save_every": 2000, "eval_batch": 256}
    data = ImageDataConfig(source="cifar10", augment=Augment(flip=0.5))
    if size == "paper":
        loop = TrainConfig(steps=400_000, batch_size=256, samples=100, **often)
        return RunConfig(row.model, data, optim, loop)
    spec = row.model.mixers[0]
    spec = spec | ({"heads": 6} if spec.get("heads") == ATTENTION["heads"] else {})
    model = replace(row.model, dim=SMALL_DIM, mixers=(spec,))
    loop = TrainConfig(steps=60_000, batch_size=128, precision="bf16", samples=40, eval_images=1000, **often)
    return RunConfig(model, data, replace(optim, lr=3e-4, warmup=1000, clip=1.0, ema=0.9995), loop)


def _smoke(row: ImageRow) -> RunConfig:
    optim = OptimConfig(lr=4e-3, weight_decay=0.0, warmup=50, ema=0.99)
    loop = TrainConfig(
        steps=1500, batch_size=32, log_every=50, eval_every=500, save_every=500, eval_batch=180, samples=40
    )
    return RunConfig(shrink(row.model), ImageDataConfig(source="digits"), optim, loop)


RECIPE = Recipe(
    "image_diffusion",
    "images by a diffusion transformer: softmax attention, External attention, AFT, Hydra, linear attention",
    ROWS,
    "attention",
    build,
)
