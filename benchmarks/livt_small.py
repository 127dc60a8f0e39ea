"""Train LiVT's two stages on the digits of scikit-learn: the balanced loss with and without masked pretraining.

    python -m benchmarks.livt_small --out DIR [--record]

The runs are those of the recipes ``livt_pretrain`` and ``livt_cifar10_lt`` at ``smoke``, with one thread. A run that
was stopped continues. ``--record`` writes benchmarks/results/livt_small.json and the picture in docs/vision.md.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path
from typing import Any

from benchmarks.rows import finish

from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report.reconstructions import reconstruction_pictures
from tokenmix.lab.report.runs import read_run
from tokenmix.lab.report.vision import run_images
from tokenmix.lab.train import evaluate_run, load_run
from tokenmix.models import MAE
from tokenmix.system.files import write_json

ROOT = Path(__file__).parent
RESULTS, PICTURE = ROOT / "results" / "livt_small.json", ROOT.parent / "docs" / "assets" / "reconstructions.png"
SHOWN = 5
ROWS: dict[str, dict[str, Any]] = {
    "random weights": {},
    "masked pretraining": {"train.init": True},
    "masked pretraining, layer decay 0.75": {"train.init": True, "optim.layer_decay": 0.75},
}


def trained(recipe: str, out: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Train a recipe's smoke run in ``out``, from wherever it stood, and return its score on the test split."""
    config = RECIPES[recipe].config().override({"train.threads": 1, "train.device": "cpu", **changes})
    finish(out, config)
    score = evaluate_run(out, device="cpu", record=False)
    names = ("pixel_loss", "mean_loss", "top1", "top1_many", "top1_medium", "top1_few", "images")
    return {name: getattr(score, name) for name in names if getattr(score, name, None) is not None}


def main() -> None:
    """Train, score, and with ``--record`` write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    first = given.out / "pretrained"
    found: dict[str, Any] = {"pretraining": trained("livt_pretrain", first, {})}
    print("pretraining", found["pretraining"], flush=True)
    found["rows"] = {}
    for i, (row, changes) in enumerate(ROWS.items()):
        changes = {name: str(first) if name == "train.init" else value for name, value in changes.items()}
        found["rows"][row] = trained("livt_cifar10_lt", given.out / f"row_{i}", changes)
        print(row, found["rows"][row], flush=True)
    if given.record:
        write_json(RESULTS, {"machine": machine(), **found})
        model, _ = load_run(first)
        assert isinstance(model, MAE)
        images, names = run_images(read_run(first), model, SHOWN)
        (picture,) = reconstruction_pictures(model, images, names)
        PICTURE.write_bytes(base64.b64decode(picture.light.partition(",")[2]))


if __name__ == "__main__":
    main()
