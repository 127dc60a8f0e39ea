"""Probe frozen ViTs with and without registers by depth, and their norms by step of training.

    python -m benchmarks.frozen_features --data CIFAR.npz --out runs/frozen             # train what is missing, print
    python -m benchmarks.frozen_features --data CIFAR.npz --out runs/frozen --record    # and keep it in its results

ViTs of 4 layers x 64 with softmax attention and a class token, images of 32 x 32 in patches of 8: no registers and
four, three seeds each, one thread, one rate that was tuned for neither. The class of CIFAR-10's test images is probed
after each layer. A run that was stopped continues.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tokenmix.lab.anatomy import read
from tokenmix.lab.anatomy.images import load_images
from tokenmix.lab.anatomy.loading import open_subject
from tokenmix.lab.anatomy.outliers import norms_by_step
from tokenmix.lab.anatomy.probes import depth_probe
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.report.runs import read_run
from tokenmix.lab.train import resume, train
from vit_anatomy import config_of

RECORD = Path(__file__).parent / "results" / "frozen_features.json"
STEPS, PATCH, SEEDS, REGISTERS = 300, 8, (0, 1, 2), (0, 4)
READ = 2000
"""Images of the test split, half of which are fitted."""


def measure_run(folder: Path, data: str) -> dict[str, Any]:
    """Return what probes find in a trained run."""
    subject = open_subject(str(folder))
    images = load_images([data], subject, limit=READ)
    depth = depth_probe(read(subject, images.pixels).pooled, images.labels)
    assert not isinstance(depth, str), depth
    steps = norms_by_step(subject, images.pixels[:300])
    return {
        "valid_top1": read_run(folder).last_eval("valid"),
        **depth._asdict(),
        "norms": {str(step): norms._asdict() for step, norms in steps.items()},
    }


def finish(folder: Path, registers: int, seed: int, data: str) -> dict[str, Any]:
    """Train a run to its end and probe it, or return what was found before."""
    kept = folder / "probes.json"
    if not kept.exists():
        changes = {"train.steps": STEPS, "train.eval_every": STEPS, "train.save_every": STEPS // 5}
        changes |= {"train.seed": seed, "train.keep": 5, "model.patch": PATCH}
        if (folder / "config.json").exists():
            resume(folder, verbose=False)
        else:
            train(config_of("attention", registers, data).override(changes), folder, verbose=False)
        kept.write_text(json.dumps(measure_run(folder, data)))
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "machine": machine(),
        "steps": STEPS,
        "read": READ,
        "seeds": SEEDS,
        "registers": REGISTERS,
        "rows": {},
    }
    for seed in SEEDS:
        for registers in REGISTERS:
            folder = given.out / f"r{registers}-s{seed}"
            found["rows"][folder.name] = finish(folder, registers, seed, given.data)
            print(folder.name, json.dumps(found["rows"][folder.name]), flush=True)
    if given.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
