r"""Measure two of the AFT paper's claims about trained models in small ones, layer by layer.

How local weights are (Figure 1): the mean distance between a token and what it reads, over that of equal weights; 1 is
global. The share near is that of the weight within one patch, or within 8 bytes, beside that of equal weights. Measured
are final runs of two sweeps: softmax attention in a ViT on CIFAR-10 and in a language model of bytes, and the bias of
AFT-full in the same ViT: exp(w), each row made to sum to 1.

Whether keys detect objects (the pictures of AFT-conv's keys): a ViT of AFT-conv learns to segment synthetic scenes, by
the recipe ``segmentation`` with that backbone. The number is the probability that a patch of a shape has a larger key
than another patch of its scene; 0.5 is chance. It is that of the best head, chosen on the validation scenes and scored
on the test scenes; once for any shape, once for each kind of shape by itself, of which the mean is given.

    tokenmix sweep benchmarks/sweeps/cifar10_parts.json --rows attention aft_full --out runs/cifar10_parts
    tokenmix sweep benchmarks/sweeps/enwik8_rows.json --rows attention --out runs/enwik8_rows
    python benchmarks/locality.py --images runs/cifar10_parts --text runs/enwik8_rows --keys runs/keys

Each of the three folders may be left out; the record keeps what it has. In the third, three models are trained, which
takes a minute each on one thread.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rows import finish
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.data import open_corpus
from tokenmix.lab.data.augment_masks import mask_batches
from tokenmix.lab.data.scenes import SCENE_CLASSES
from tokenmix.lab.recipes import find_recipe
from tokenmix.lab.report.biases import pair_bias
from tokenmix.lab.report.maps import attention_weights, average_relative_attention, key_maps, relative_sums
from tokenmix.lab.train import RunConfig, load_run
from tokenmix.lab.train.image_tasks import ClassifyTask
from tokenmix.lab.train.segmentation_task import SegmentationTask
from tokenmix.models import ViTConfig, build_model

RECORD = Path(__file__).parent / "results" / "locality.json"
METRIC = "measure"
MEASURED = {
    "vit": ("relative distance, ViT", "distance"),
    "vit_bias": ("relative distance, bias of AFT-full", "distance"),
    "lm": ("relative distance, language model", "distance"),
    "keys": ("keys that name shapes", "any"),
}
"""Run -> what the trials of ``tokenmix.lab.papers`` compare of it, and its name in the record."""
ROWS = {"vit": "attention", "vit_bias": "aft_full", "lm": "attention"}
IMAGES, WINDOWS, NEAR = 256, 32, {"vit": 1, "vit_bias": 1, "lm": 8}
PATCH, SEEDS = 4, (0, 1, 2)


def keys_config(seed: int) -> RunConfig:
    """Return the config of a ViT with AFT-conv that segments scenes of 64 x 64."""
    config = find_recipe("segmentation").config("aft_conv", "smoke")
    spec = {"name": "aft_conv", "heads": 16, "kernel_size": 7, "qkv_bias": False}
    size: Any = config.model
    backbone = ViTConfig(
        dim=48,
        layers=4,
        mixers=(spec,),
        image_size=size.backbone.image_size,
        patch=PATCH,
        classes=0,
        pool="mean",
        positions=None,
    )
    model = replace(size, backbone=backbone, head=replace(size.head, levels=(0,)))
    loop = replace(config.train, seed=seed, threads=1, samples=0, eval_every=600, save_every=600)
    return replace(config, model=model, train=loop)


def by_distance(weights: Tensor, distances: Tensor, near: float) -> dict[str, float]:
    """Return how local weights are that were summed by distance, both of any one shape."""
    return {
        "distance": float((weights * distances).sum() / weights.sum()),
        "near": float(weights[distances <= near].sum() / weights.sum()),
    }


def relative(weights: Tensor, counts: Tensor, distances: Tensor, near: float) -> dict[str, float]:
    """Compare sums of weights with equal weights: the ratio of mean distances, and both shares of what is near."""
    ours, equal = by_distance(weights, distances, near), by_distance(counts.double(), distances, near)
    return {"distance": ours["distance"] / equal["distance"], "near": ours["near"], "near_equal": equal["near"]}


def measure_vit(model: Any, images: Tensor, run: str) -> list[dict[str, float]]:
    """Measure each layer of a ViT: its attention on images, or the bias of AFT-full, by offset on the grid."""
    if run == "vit":
        found = average_relative_attention(model, images)
        counts, sums = found.counts, [(each * found.counts).sum(0) for each in found.means]
    else:
        side = images.shape[-1] // model.config.patch
        factors = [pair_bias(block.mixer).double()[None, None] + 1 for block in model.blocks]
        sums = [relative_sums(f / f.sum(-1, keepdim=True), (side, side))[0][0] for f in factors]
        counts = relative_sums(factors[0], (side, side))[1]
    rows, columns = (torch.arange(n) - n // 2 for n in counts.shape)
    across = torch.sqrt(rows[:, None] ** 2 + columns**2)
    reach = 2**0.5 * NEAR[run]  # the patches around a patch, those at its corners too
    return [relative(each, counts, across, reach) for each in sums]


def measure_lm(model: Any, text: Tensor) -> list[dict[str, float]]:
    """Measure each layer of a language model: its attention on windows (n, T), by distance to the past."""
    place = torch.arange(text.shape[1])
    distances = place[:, None] - place
    past = distances >= 0
    sums: dict[int, Tensor] = {}

    def look(layer: int) -> Any:
        def hook(mixer: Any, given: tuple[Tensor, ...], _: Any) -> None:
            weights = attention_weights(mixer, given[0]).masked_fill(
                ~past, 0.0
            )  # of softmax over all, then over s <= t
            sums[layer] = sums.get(layer, 0.0) + (weights / weights.sum(-1, keepdim=True)).mean((0, 1))

        return hook

    hooks = [block.mixer.register_forward_hook(look(i)) for i, block in enumerate(model.blocks)]
    with torch.no_grad():
        for window in text.split(8):
            model(window)
    for hook in hooks:
        hook.remove()
    equal = past / past.sum(-1, keepdim=True)
    return [relative(sums[i][past], equal[past], distances[past], NEAR["lm"]) for i in sorted(sums)]


def detection(keys: Tensor, found: Tensor) -> Tensor:
    """Return for each map of keys (B, n, P) how probably a patch that is found has a larger key than one that is not.

    Found are (B, P); images in which all patches are alike do not count.
    """
    some = found.any(1) & ~found.all(1)
    keys, found = keys[some], found[some][:, None].double()
    ranks = keys.argsort(-1).argsort(-1) + 1.0
    n = found.sum(-1)
    larger = (ranks * found).sum(-1) - n * (n + 1) / 2
    return (larger / (n * (found.shape[-1] - n))).mean(0)


def measure_keys(model: Any, config: RunConfig) -> list[dict[str, Any]]:
    """Measure how well the keys of each layer detect shapes, by the heads that do so best on the validation scenes."""
    found = [_keys_and_shapes(model, config, split) for split in ("valid", "test")]
    layers = []
    for i in found[0][0]:
        scores = []
        for kind in range(len(SCENE_CLASSES)):
            valid, test = (detection(keys[i], shapes[kind]) for keys, shapes in found)
            scores.append(float(test[valid.argmax()]))
        layers.append({"any": scores[0], "kind": mean(scores[1:])})
    return layers


def _keys_and_shapes(model: Any, config: RunConfig, split: str) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return keys by layer (B, heads, P), and which patches (B, P) are mostly of any shape, and of each kind."""
    task = SegmentationTask(config)
    given = {"batch_size": 200, "image_size": config.model.backbone.image_size, "channels": 3, "limit": 200}
    images, masks = next(iter(mask_batches(task.images.split(split), **given, **task.pixels)))
    cells = torch.stack(list(masks)).unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
    kinds = [cells > 0, *(cells == kind for kind in range(1, len(SCENE_CLASSES)))]
    keys = {i: maps.flatten(2) for i, maps in key_maps(model.backbone, images).items()}
    return keys, [kind.double().mean(-1) > 0.5 for kind in kinds]


def measure(run: str, model: Any, config: RunConfig) -> list[dict[str, Any]]:
    """Measure each layer of a model on what it was not trained on."""
    model.eval()
    if run == "lm":
        text, length = open_corpus(config.data.source, path=config.data.path).split("valid"), config.data.seq_len
        part = torch.as_tensor(np.asarray(text[: WINDOWS * length]).astype(np.int64))
        return measure_lm(model, part.view(WINDOWS, length))
    if run == "keys":
        return measure_keys(model, config)
    return measure_vit(model, torch.cat([x for x, _ in ClassifyTask(config).held_out("valid", IMAGES)]), run)


def measure_folder(run: str, folder: Path, seed: int, record: dict[str, Any]) -> None:
    """Measure a finished run, and the new model that it began with, into the record."""
    model, config = load_run(folder)
    torch.manual_seed(seed)
    found = {"start": measure(run, build_model(config.model), config), "trained": measure(run, model, config)}
    record["runs"].setdefault(run, {})[str(seed)] = found
    seeds = [each["trained"] for each in record["runs"][run].values()]
    record["mean"][run] = {
        str(i + 1): {name: mean(layers[i][name] for layers in seeds) for name in layer}
        for i, layer in enumerate(found["trained"])
    }
    record["rows"] = list_rows(record["runs"])
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(folder, json.dumps(found["trained"]), flush=True)


def list_rows(runs: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return what the claims of the AFT paper compare: the measure of each layer by seed, trained and untrained."""
    return {
        f"{name}, layer {i + 1}{', untrained' * (when == 'start')}": {
            METRIC: [seeds[seed][when][i][key] for seed in sorted(seeds)]
        }
        for run, seeds in runs.items()
        for name, key in [MEASURED[run]]
        for when in ("start", "trained")
        for i in range(len(next(iter(seeds.values()))[when]))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="folder of the sweep cifar10_parts")
    parser.add_argument("--text", type=Path, help="folder of the sweep enwik8_rows")
    parser.add_argument("--keys", type=Path, help="folder for the runs on scenes")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="of the runs on scenes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record = {"machine": machine(), "metric": METRIC, "runs": {}, "mean": {}} | record
    for run, row in ROWS.items():
        sweep = given.text if run == "lm" else given.images
        for folder in sorted(sweep.glob(f"runs/final/{row}/*_seed_*")) if sweep else []:
            measure_folder(run, folder, int(folder.name.rpartition("_")[2]), record)
    for seed in given.seeds if given.keys else ():
        folder = given.keys / f"keys-{seed}"
        finish(folder, keys_config(seed))
        measure_folder("keys", folder, seed, record)


if __name__ == "__main__":
    main()
