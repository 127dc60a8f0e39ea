"""Train the rows of the recipe ``segmentation`` at its smoke size on synthetic scenes, and score them on test scenes.

    python benchmarks/segmentation_small.py --data scenes --out DIR [--rows pvt ...] [--jobs 1]
    python benchmarks/segmentation_small.py --out DIR --results benchmarks/results/segmentation_small.json

One seed and one rate that was tuned for no row: the numbers show that each row learns, not which is better.
"""

from __future__ import annotations

import time
from pathlib import Path

from image_rows import finish, keep_result, run_rows
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import evaluate_run, load_run

RECIPE = RECIPES["segmentation"]


def run_row(row: str, data: str, out: Path) -> None:
    """Train a row to its end and score it on the test split."""
    began = time.process_time()
    config = RECIPE.config(row, "smoke").override({"data.source": data, "train.threads": 1})
    summary = finish(out / row, config)
    score = evaluate_run(out / row, device="cpu")
    model, _ = load_run(out / row)
    keep_result(
        out / row,
        summary,
        parameters=sum(p.numel() for p in model.parameters()),
        cpu_seconds=round(time.process_time() - began, 1),
        test_miou=score.miou,
        test_pixel_accuracy=score.pixel_accuracy,
        test_iou=score.iou,
        test_images=score.images,
    )


if __name__ == "__main__":
    run_rows(__file__, __doc__ or "", {"segmentation": list(RECIPE.rows)}, run_row)
