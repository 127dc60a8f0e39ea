"""Probe frozen ViTs with and without registers by depth, and their norms by step of training.

    python -m benchmarks.frozen_features --data CIFAR.npz --out runs/frozen             # train what is missing, print
    python -m benchmarks.frozen_features --data CIFAR.npz --out runs/frozen --record    # and keep it in its results

ViTs of 4 layers x 64 with softmax attention and a class token, images of 32 x 32 in patches of 8: no registers and
four, three seeds each, one thread, one rate that was tuned for neither. The class of CIFAR-10's test images is probed
after each layer; the masks of synthetic scenes, which the models have never seen, from the patches of the output. A
run that was stopped continues.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from tokenmix.lab.anatomy import read
from tokenmix.lab.anatomy.images import load_images
from tokenmix.lab.anatomy.loading import open_subject
from tokenmix.lab.anatomy.outliers import norms_by_step
from tokenmix.lab.anatomy.probes import depth_probe, segmentation_probe
from tokenmix.lab.anatomy.subject import ProbedModel
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.data.scenes import SCENE_CLASSES, scene
from tokenmix.lab.report.runs import read_run
from tokenmix.lab.train import resume, train
from vit_anatomy import config_of

RECORD = Path(__file__).parent / "results" / "frozen_features.json"
STEPS, PATCH, SEEDS, REGISTERS = 600, 8, (0, 1, 2), (0, 4)
READ, SCENES = 2000, 400
"""Images of the test split, half of which are fitted; scenes to fit on, and as many to score."""


def measured(folder: Path, data: str) -> dict[str, Any]:
    """Return what probes find in a trained run."""
    subject = open_subject(str(folder))
    images = load_images([data], subject, limit=READ)
    depth = depth_probe(read(subject, images.pixels).pooled, images.labels)
    assert not isinstance(depth, str), depth
    steps = norms_by_step(subject, images.pixels[:500])
    return {
        "valid_top1": read_run(folder).last_eval("valid"),
        **depth._asdict(),
        "scenes_miou": scenes_miou(subject),
        "norms": {str(step): norms._asdict() for step, norms in steps.items()},
    }


def scenes_miou(subject: ProbedModel) -> float:
    """Return the mean IoU of a linear probe on the masks of scenes, from the patches of the output."""
    drawn = [scene(0, i, subject.image_size) for i in range(2 * SCENES)]
    moments = (torch.tensor(each).view(-1, 1, 1) for each in (subject.mean, subject.std))
    centre, scale = moments
    tokens = read(subject, torch.stack([(image / 255 - centre) / scale for image, _ in drawn])).patches
    masks = torch.stack([mask for _, mask in drawn])
    parts = tokens[:SCENES], masks[:SCENES], tokens[SCENES:], masks[SCENES:]
    return segmentation_probe(*parts, subject.grid, len(SCENE_CLASSES))


def table(found: dict[str, Any]) -> str:
    """Return the tables of docs/anatomy.md: probes by depth, and norms by step."""
    kinds = ("[CLS]", "mean of registers", "mean of all patches")
    heads = ["after layer", "registers", *(f"{kind}: linear / k-NN" for kind in kinds)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    rows = {n: [found["rows"][f"r{n}-s{seed}"] for seed in found["seeds"]] for n in found["registers"]}
    for layer in range(len(rows[0][0]["linear"]["[CLS]"])):
        for n, runs in rows.items():
            cells = ["before" if layer == 0 else str(layer - 1), str(n)]
            for kind in kinds:
                both = (
                    [100 * run[how][kind][layer] for run in runs if kind in run[how]] for how in ("linear", "nearest")
                )
                cells.append(" / ".join(spread(each) for each in both if each))
            lines.append("| " + " | ".join(cells) + " |")
    heads = ["registers", "top-1, %", "mIoU of scenes, %", "norm after the last layer, median / largest, at step"]
    steps = list(rows[0][0]["norms"])
    heads = [*heads[:3], *(f"norms, step {int(step):,}" for step in steps)]
    lines += ["", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for n, runs in rows.items():
        cells = [str(n), spread([100 * run["valid_top1"] for run in runs])]
        cells.append(spread([100 * run["scenes_miou"] for run in runs]))
        for step in steps:
            middle, most = (mean(run["norms"][step][each][-1] for run in runs) for each in ("median", "largest"))
            cells.append(f"{middle:.1f} / {most:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Return mean and standard deviation over seeds."""
    return f"{mean(values):.1f} ± {stdev(values):.1f}"


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
        "scenes": SCENES,
        "seeds": SEEDS,
        "registers": REGISTERS,
        "rows": {},
    }
    for seed in SEEDS:
        for registers in REGISTERS:
            folder = given.out / f"r{registers}-s{seed}"
            changes = {"train.steps": STEPS, "train.eval_every": STEPS, "train.save_every": STEPS // 5}
            changes |= {"train.seed": seed, "train.keep": 5, "model.patch": PATCH}
            if (folder / "config.json").exists():
                resume(folder, verbose=False)
            else:
                train(config_of("attention", registers, given.data).override(changes), folder, verbose=False)
            found["rows"][folder.name] = measured(folder, given.data)
            print(folder.name, json.dumps(found["rows"][folder.name]), flush=True)
    print(table(found))
    if given.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
