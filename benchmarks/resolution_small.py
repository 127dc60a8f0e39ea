r"""Train at 32 x 32, then test and fine-tune at 64 x 64, on images that hold 64 x 64 pixels.

AFT-conv, which takes any size, is compared with attention and Hydra, which are resized.

    python benchmarks/resolution_small.py --data tiny-imagenet --out runs/resolution_small [--only small large] \
        [--jobs 2]
    python benchmarks/resolution_small.py --out runs/resolution_small --results benchmarks/results/resolution_small.json

``small`` trains on the images scaled down to 32 and tests at 32 to 64; models with learned positions are resized first.
``large`` trains some more steps at 64 from those weights. Each row runs in its own process and run directory with one
thread.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from image_rows import data_source, finish, keep_result, run_rows
from tokenmix.hosts import convert_command
from tokenmix.lab.data import Augment
from tokenmix.lab.train import ImageDataConfig, OptimConfig, RunConfig, TrainConfig, load_run
from tokenmix.lab.train.image_tasks import ClassifyTask, open_set
from tokenmix.models import ViTConfig
from vision_small import ROWS

SMALL, LARGE, SIZES = 32, 64, (32, 40, 48, 64)
STEPS, TUNING_STEPS = 800, 150
NAMES = ("attention", "aft_conv_k7", "hydra")


def config_of(row: str, data: str) -> RunConfig:
    """Return the run of a row."""
    part, _, name = row.partition("/")
    large = part == "large"
    source = ImageDataConfig(**data_source(data), augment=Augment(crop="pad", pad=8 if large else 4, flip=0.5))
    side = LARGE if large else SMALL
    model: ViTConfig = replace(ROWS[name], image_size=(side, side), classes=len(open_set(source, 3).classes))
    optim = OptimConfig(lr=1e-3 if large else 2e-3, weight_decay=0.05, warmup=50 if large else 100, min_lr_ratio=0.01)
    often: dict[str, Any] = {
        "log_every": 50,
        "eval_every": 100 if large else 500,
        "save_every": 50 if large else 150,
        "keep": 1,
    }
    loop = TrainConfig(
        steps=TUNING_STEPS if large else STEPS, batch_size=64, threads=1, eval_batch=128, eval_images=500, **often
    )
    return RunConfig(model, source, optim, loop, recipe="resolution_small", row=row)


def run_row(row: str, data: str, out: Path) -> None:
    """Train a row to its end and score it at every size."""
    folder, config = out / row, config_of(row, data)
    part, _, name = row.partition("/")
    if part == "large":
        config = replace(config, train=replace(config.train, init=str(enlarged(config.model, out, name))))
    summary = finish(folder, config)
    scores = {str(side): score_at(folder, side) for side in (SIZES if part == "small" else (LARGE,))}
    keep_result(folder, summary, test_top1=scores)


def enlarged(config: Any, out: Path, name: str) -> Path:
    """Put the weights of a small run into a model of the larger size."""
    folder = out / "resized" / name
    if not (folder / "config.json").exists():
        convert_command(str(out / "small" / name), config, folder, resize=True)
    return folder


def score_at(folder: Path, side: int) -> float:
    """Return the top-1 accuracy of a run on its test images at another size."""
    model: Any
    model, config = load_run(folder)
    if model.fixed_size:
        model.resize(side)
    return ClassifyTask(config).evaluate(model, "test", image_size=side).top1


PARTS = {"small": [f"small/{name}" for name in NAMES], "large": [f"large/{name}" for name in NAMES]}

if __name__ == "__main__":
    run_rows(__file__, __doc__ or "", PARTS, run_row)
