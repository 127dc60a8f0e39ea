"""Compare density models of 16 x 16 crops of CIFAR-10, T = 768 sub-pixels, in bits per dimension.

The rows are AFT-local with factors and with a plain table, AFT-simple, and softmax attention.

    python benchmarks/density_small.py --data cifar10 --out runs/density_small [--rows aft_local ...] [--jobs 2]
    python benchmarks/density_small.py --out runs/density_small --results benchmarks/results/density_small.json

Each row trains in its own process and run directory with one thread. A row that has finished is not run again; one that
was stopped continues. Bits per dimension are meaningful only for exact pixels, not for images compressed with loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from image_rows import data_source, finish, keep_result, run_rows
from tokenmix.lab.data import Augment
from tokenmix.lab.train import ImageDataConfig, OptimConfig, RunConfig, TrainConfig, evaluate_run, load_run
from tokenmix.models import ImageDensityConfig

DIM, LAYERS, SIZE, BATCH, STEPS = 64, 4, (16, 16), 8, 1500
LOCAL = {"name": "aft_local", "window": 128, "rank": 32}
ROWS: dict[str, dict[str, Any]] = {
    "aft_local": LOCAL,
    "attention": {"name": "attention", "heads": 2},
    "aft_simple": {"name": "aft_simple"},
    "aft_local_plain": {**LOCAL, "rank": None},
    "image_transformer": {"name": "image_local", "heads": 2, "block": 96, "memory": 96},
}


def config_of(row: str, data: str) -> RunConfig:
    """Return the run of a row."""
    model = ImageDensityConfig(dim=DIM, size=SIZE, mixers=(ROWS[row],), layers=LAYERS)
    images = ImageDataConfig(**data_source(data), augment=Augment(flip=0.5, shift=10))
    optim = OptimConfig(lr=3e-3, weight_decay=0.1, schedule="vaswani", warmup=200)
    often: dict[str, Any] = {
        "log_every": 50,
        "eval_every": 500,
        "save_every": 250,
        "keep": 1,
        "eval_batch": 16,
        "samples": 8,
    }
    return RunConfig(
        model,
        images,
        optim,
        TrainConfig(steps=STEPS, batch_size=BATCH, threads=1, eval_images=200, **often),
        recipe="density_small",
        row=row,
    )


def run_row(row: str, data: str, out: Path) -> None:
    """Train a row to its end and score it on the centres of the test images."""
    summary = finish(out / row, config_of(row, data))
    model, _ = load_run(out / row)
    score = evaluate_run(out / row, device="cpu")
    keep_result(
        out / row,
        summary,
        parameters=sum(p.numel() for p in model.parameters()),
        test_bits_per_dim=score.bits_per_dim,
        test_images=score.images,
    )


if __name__ == "__main__":
    run_rows(__file__, __doc__ or "", {"density": list(ROWS)}, run_row)
