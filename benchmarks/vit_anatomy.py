"""Measure the anatomy of small ViTs with and without registers.

    python -m benchmarks.vit_anatomy --data CIFAR.npz --out runs/anatomy             # train what is missing, print
    python -m benchmarks.vit_anatomy --data CIFAR.npz --out runs/anatomy --record    # and keep it in its results

Four ViTs of 4 layers x 64 on images of 32 x 32 in patches of 4, softmax attention with a class token and AFT-conv with
the mean over patches, with no registers and with four: one seed, one thread, one rate that was tuned for no row. The
1 % of patches with the largest norms are compared with the others where no patch stands out. A run that was stopped
continues.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tokenmix.lab.anatomy import dissect
from tokenmix.lab.anatomy.anatomy_page import write_page
from tokenmix.lab.anatomy.images import load_images
from tokenmix.lab.anatomy.loading import open_subject
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.recipes import find_recipe
from tokenmix.lab.report.runs import read_run
from tokenmix.lab.train import RunConfig, match_data, resume, train

RECORD = Path(__file__).parent / "results" / "vit_anatomy.json"
STEPS, RATE, PATCH, READ, TOP = 250, 2e-3, 4, 1000, 1.0
ROWS = {"attention": "class", "aft_conv_k7": "mean"}
"""Rows of the recipe aft_cifar10_classify, and how their tokens are pooled."""


def config_of(row: str, registers: int, data: str) -> RunConfig:
    """Return the run of a row with some registers."""
    changes: dict[str, Any] = {"model.patch": PATCH, "model.registers": registers, "model.pool": ROWS[row]}
    changes |= {"data.augment.pad": 4, "data.augment.flip": 0.5, "optim.lr": RATE}
    changes |= {
        "train.steps": STEPS,
        "train.eval_every": STEPS,
        "train.save_every": 50,
        "train.threads": 1,
        "train.device": "cpu",
    }
    config = find_recipe("aft_cifar10_classify").config(row, "smoke").override({"data.source": data, **changes})
    return match_data(config)


def measured(folder: Path, data: str) -> dict[str, Any]:
    """Dissect a trained run on the test split, write its page, and return the numbers."""
    subject = open_subject(str(folder))
    images = load_images([data], subject, limit=READ)
    top = dissect(subject, images, top=TOP)
    found = dissect(subject, images)
    write_page(top, folder / "anatomy.html")
    kept = {"fence": found.to_json(), "top": top.to_json(), "valid_top1": read_run(folder).last_eval("valid")}
    for each in (kept["fence"], kept["top"]):
        del each["model"], each["objects"]  # paths, and boxes of single images
    return kept


def table(found: dict[str, Any]) -> str:
    """Return the rows of the table in docs/anatomy.md."""
    lines = []
    for name, row in found["rows"].items():
        fence, top = row["fence"], row["top"]
        mixer, registers = name.split("-r")
        position, pixels, alike = top["probes"]["position"], top["probes"]["pixels"], top["similarity"]
        classes = fence["classified"]["accuracy"]
        looks = [each["smooth"] for token, each in fence["looks"]["tokens"].items() if token.startswith("register")]
        cells = [
            mixer,
            registers,
            f"{100 * row['valid_top1']:.1f}",
            f"{100 * fence['outliers']:.2f}",
            f"{fence['norm_median']:.1f} / {fence['norm_largest']:.1f} / {fence['cutoff']:.1f}",
            f"{alike['outliers']:.2f} / {alike['others']:.2f}",
            f"{100 * position['outliers']:.1f} / {100 * position['others']:.1f}",
            f"{pixels['outliers']:.2f} / {pixels['others']:.2f}",
            f"{100 * classes['one patch']:.1f} / {100 * classes['mean of all patches']:.1f}",
            f"{sum(looks) / len(looks):.2f}" if looks else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine(), "steps": STEPS, "rate": RATE, "read": READ, "top": TOP, "rows": {}}
    for row in ROWS:
        for registers in (0, 4):
            folder = given.out / f"{row}-r{registers}"
            if (folder / "config.json").exists():
                resume(folder, verbose=False)
            else:
                train(config_of(row, registers, given.data), folder, verbose=False)
            found["rows"][folder.name] = measured(folder, given.data)
            print(folder.name, json.dumps(found["rows"][folder.name]), flush=True)
    if given.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
