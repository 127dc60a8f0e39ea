"""Probe the models of ``vision_small.py``: token norms, and one-tap filters run as a gather.

Token norms are given by layer and training step, to show whether they have outliers.

    python benchmarks/vision_probes.py --out runs/vision_small [--images 500]

Reads the run directories that exist and writes benchmarks/results/vision_probes.json; existing entries are not probed
again, unless with --again. Norms: L2 norms of patch tokens after the last block and at the layer where they reach
furthest, over test images; outliers are those above Tukey's far fence of that layer and step (third quartile plus three
times the interquartile range). Gather: the test accuracy of the model as trained, and of the model in which one tap of
each head's filter is left, read by index.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmix.lab.data.augment import eval_batches
from tokenmix.lab.report.norms import outlier_cutoff, share_above, token_norms
from tokenmix.lab.train import load_run
from tokenmix.lab.train.image_tasks import ClassifyTask, open_set
from tokenmix.models.one_hot import to_gather
from tokenmix.system.checkpoint import list_steps
from whole_models import RESULTS

NORM_ROWS = (
    *(f"registers/{n}" for n in (0, 1, 4, 8)),
    "attention",
    "aft_full",
    "aft_conv_k7",
    "aft_simple",
    "hydra",
    "hydra_last_3",
    "external",
)
GATHER_ROWS = (
    "aft_conv_k7",
    "aft_conv_k7_raw",
    "one_hot/0.01",
    "one_hot/0.1",
    "one_hot_tuned/10",
    "one_tap/1",
    "one_tap_tuned/1",
)


def norms_of(folder: Path, count: int) -> dict[str, Any]:
    """Return checkpoint step -> norms by layer."""
    found, images = {}, None
    for step in list_steps(folder / "checkpoints"):
        model, config = load_run(folder, step=step)
        images = test_images(config, count) if images is None else images
        norms = token_norms(model, images)
        layers = [layer_norms(layer) for layer in norms.patches]
        prefix = [[round(float(n), 3) for n in layer.mean(0)] for layer in norms.prefix]
        found[str(step)] = {"layers": layers, "prefix_means": prefix}
    return found


def layer_norms(norms: Tensor) -> dict[str, float]:
    """Return the distribution of one layer's norms (B, H, W)."""
    flat = norms.flatten()
    median, high, most = (float(flat.quantile(q)) for q in (0.5, 0.999, 1.0))
    return {
        "median": median,
        "q99.9": high,
        "max": most,
        "max_to_median": most / median,
        "outliers": float(share_above(norms[None], outlier_cutoff(norms))[0]),
    }


def test_images(config: Any, count: int) -> Tensor:
    """Return the first test images, as the model is given them."""
    split = open_set(config.data, config.model.channels).split("test")
    options = {
        "mean": config.data.mean,
        "std": config.data.std,
        "image_size": config.model.image_size,
        "channels": config.model.channels,
    }
    return next(images for images, _ in islice(eval_batches(split, batch_size=count, **options), 1))


def gather_of(folder: Path) -> dict[str, Any]:
    """Measure accuracy and seconds, dense and as a gather, and how much of the filters the kept taps hold."""
    model, config = load_run(folder)
    task, gather = ClassifyTask(config), to_gather(model)
    kept = torch.cat([part.kept for part in gather.modules() if hasattr(part, "kept")])
    found: dict[str, Any] = {
        "kept_mean": float(kept.mean()),
        "kept_least": float(kept.min()),
        "heads_above_0.9": float((kept > 0.9).double().mean()),
    }
    for name, one in (("dense", model), ("gather", gather)):
        began = time.perf_counter()
        found[name] = {"test_top1": task.evaluate(one, "test").top1, "seconds": time.perf_counter() - began}
    return found


def show(found: dict[str, Any]) -> None:
    """Print what was found."""
    for row, steps in found["norms"].items():
        for step, entry in steps.items():
            last, layer = entry["layers"][-1], furthest(entry)
            there = entry["layers"][layer]
            print(
                f"{row:14} step {step:>5}  after the last layer: median {last['median']:7.2f}, "
                f"max/median {last['max_to_median']:5.2f}, ",
                end="",
            )
            print(
                f"outliers {last['outliers']:.2%}; furthest after layer {layer}: "
                f"{there['max_to_median']:5.2f}, {there['outliers']:.2%}"
            )
    for row, entry in found["gather"].items():
        print(f"{row:14} dense {entry['dense']['test_top1']:.4f}  gather {entry['gather']['test_top1']:.4f}  ", end="")
        print(f"kept {entry['kept_mean']:.3f}, least {entry['kept_least']:.3f}")


def furthest(entry: dict[str, Any]) -> int:
    """Return the layer whose largest norm is furthest above its median."""
    return max(range(len(entry["layers"])), key=lambda i: entry["layers"][i]["max_to_median"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of vision_small.py")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--again", action="store_true", help="probe rows again that stand in the JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path, found = RESULTS / "vision_probes.json", {"images": given.images, "norms": {}, "gather": {}}
    if path.exists() and not given.again:
        found = json.loads(path.read_text())
    probes: dict[str, tuple[tuple[str, ...], Callable[[Path], Any]]] = {
        "norms": (tuple(NORM_ROWS), lambda folder: norms_of(folder, found["images"])),
        "gather": (GATHER_ROWS, gather_of),
    }
    for part, (rows, probe) in probes.items():
        for row in rows:
            if row not in found[part] and (given.out / row / "result.json").exists():
                found[part][row] = probe(given.out / row)
        path.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
