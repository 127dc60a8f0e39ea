"""The density of CIFAR-10, sub-pixel by sub-pixel (AFT, arXiv 2105.14103, Sec. 5.1): the rows of Tables 2 and 3.

From the paper: 3072 sub-pixels of 256 values, learned positions, AFT-local of window 256 with factors of rank 64, AdamW
at 3e-3 with the warm-up schedule of Vaswani et al., weight decay 0.1 on linear weights, dropout 0.1, batch 128, 200
epochs; a random flip, then one value in -10..10 added to all sub-pixels.

Not in the paper: the length of the warm-up (4000 here), clipping (not mentioned there; 1.0 here), the Image
Transformer's two-dimensional blocks (8 lines of 96 sub-pixels) and their memory (8 lines above, 48 sub-pixels on either
side).

``gpu``: 20,000 steps of batch 32 in bf16. ``smoke``: a sixth of the layers and a quarter of the width on the 8 x 8
digits of scikit-learn, one channel; 4 layers x 64 for 24 x 256.
"""

from __future__ import annotations

from dataclasses import replace

from ...models import ImageDensityConfig
from ...types import Options, Spec
from ..data.augment import Augment
from ..train import ImageDataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig
from .images import CIFAR_IMAGES, ImageRow
from .recipe import Recipe

EPOCHS, BATCH = 200, 128
AUGMENT = Augment(flip=0.5, shift=10)
LOCAL = {"name": "aft_local", "window": 256, "rank": 64}
OPTIM = OptimConfig(lr=3e-3, weight_decay=0.1, schedule="vaswani", warmup=4000)
SIZE, CHANNELS = (32, 32), 3
TABLE2: dict[str, tuple[tuple[Spec, ...], int, int, dict[str, float]]] = {
    # row -> (specs, layers, dim, printed bits per dimension, iterations per second and GB per GPU on 8 V100)
    "sparse_strided_128x256": (
        ({"name": "strided", "heads": 2, "stride": 96},),
        128,
        256,
        {"test": 2.80},
    ),
    "image_transformer_12x512": (
        ({"name": "image_local", "heads": 4, "ndim": 2, "block": [8, 96], "memory": [8, 48]},),
        12,
        512,
        {"test": 2.90, "iterations_per_s": 1.61, "gb_per_gpu": 22.3},
    ),
    "transformer_12x512": (
        ({"name": "attention", "heads": 4},),
        12,
        512,
        {"train": 2.90, "test": 2.88, "iterations_per_s": 1.35, "gb_per_gpu": 30.6},
    ),
    "transformer_24x256": (
        ({"name": "attention", "heads": 2},),
        24,
        256,
        {"train": 2.90, "test": 2.86, "iterations_per_s": 1.36, "gb_per_gpu": 30.4},
    ),
    "aft_local_256_12x512": (
        (LOCAL,),
        12,
        512,
        {"train": 2.78, "test": 2.80, "iterations_per_s": 1.68, "gb_per_gpu": 11.4},
    ),
    "aft_local_256_24x256": (
        (LOCAL,),
        24,
        256,
        {"train": 2.75, "test": 2.74, "iterations_per_s": 1.67, "gb_per_gpu": 12.8},
    ),
    "aft_simple_24x256": (
        ({"name": "aft_simple"},),
        24,
        256,
        {"train": 2.82, "test": 2.89, "iterations_per_s": 2.15, "gb_per_gpu": 9.5},
    ),
}


def rows() -> dict[str, ImageRow]:
    """Return every row by name."""
    found = {}
    for name, (specs, layers, dim, printed) in TABLE2.items():
        found[f"table2/{name}"] = ImageRow(f"Table 2: {layers} layers x {dim}", density(specs, layers, dim), printed)
    plain, printed = {**LOCAL, "rank": None}, {"train": 2.82, "test": 2.84}
    found["table3/plain"] = ImageRow(
        "Table 3: AFT-local, a plain table of pairs, 9.6M parameters per layer", density((plain,), 24, 256), printed
    )
    found["table3/factors"] = ImageRow(
        "Table 3: AFT-local, factors, 0.6M parameters per layer",
        density((LOCAL,), 24, 256),
        {"train": 2.75, "test": 2.74},
    )
    return found


def density(specs: tuple[Spec, ...], layers: int, dim: int) -> ImageDensityConfig:
    """Return the paper's model."""
    return ImageDensityConfig(dim=dim, size=SIZE, channels=CHANNELS, mixers=specs, layers=layers, dropout=0.1)


def build(row: ImageRow, size: str) -> RunConfig:
    """Return the config of a row at a size."""
    if size == "smoke":
        return _smoke(row)
    data = ImageDataConfig(source="cifar10", augment=AUGMENT)
    if size == "paper":
        loop = TrainConfig(
            steps=EPOCHS * CIFAR_IMAGES // BATCH,
            batch_size=BATCH,
            log_every=100,
            eval_every=2000,
            save_every=1000,
            eval_batch=32,
            samples=8,
        )
        return RunConfig(row.model, data, OPTIM, loop)
    often: Options = {
        "log_every": 50,
        "eval_every": 2000,
        "save_every": 1000,
        "eval_images": 500,
        "eval_batch": 32,
        "samples": 8,
    }
    loop = TrainConfig(steps=20_000, batch_size=32, precision="bf16", **often)
    return RunConfig(row.model, data, replace(OPTIM, warmup=2000), loop)


def _smoke(row: ImageRow) -> RunConfig:
    caps = {"window": 16, "rank": 16, "stride": 8, "block": [2, 8], "memory": [2, 4]}
    mixers = tuple({k: v if v is None else caps.get(k, v) for k, v in spec.items()} for spec in row.model.mixers)
    model = replace(
        row.model,
        dim=row.model.dim // 4,
        size=(8, 8),
        channels=1,
        mixers=mixers,
        layers=row.model.layers // 6,
        dropout=0.0,
    )
    loop = TrainConfig(
        steps=400, batch_size=32, log_every=20, eval_every=200, save_every=200, eval_images=100, samples=8
    )
    return RunConfig(
        model, ImageDataConfig(source="digits", augment=Augment(shift=2)), replace(OPTIM, warmup=100), loop
    )


RECIPE = Recipe(
    "aft_cifar10_density",
    "AFT against Transformers on CIFAR-10 sub-pixels: Tables 2 and 3 of the AFT paper",
    rows(),
    "table2/aft_local_256_24x256",
    build,
    {"table3/factors": "table2/aft_local_256_24x256"},
)
