"""Take trained ViTs of the sweep `cifar10` further: anatomy, other test sizes, other mixers than softmax attention.

    tokenmix sweep benchmarks/sweeps/cifar10.json --data CIFAR --out SWEEP
    python -m benchmarks.converged_vit SWEEP --data CIFAR --out runs/converged [--tune 300]

Without ``--tune`` nothing is trained: the anatomy of each row, its top-1 at larger test sizes, and that of the softmax
model with Hydra in its last k layers or in every second one, and with AFT-conv, whose new weights are random. With
``--tune N`` some of these, and the softmax model to compare them with, are trained for N steps more. Only runs of seed
0 are read. What has been measured is not measured again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokenmix.hosts.vit.convert import convert_vit
from tokenmix.lab.anatomy import dissect
from tokenmix.lab.anatomy.images import load_images
from tokenmix.lab.anatomy.loading import open_subject
from tokenmix.lab.train import RunConfig, load_run, train
from tokenmix.lab.train.tasks import open_task
from tokenmix.models import replace_layers
from tokenmix.system.files import write_json
from tokenmix.system.machine import cpu_name, pick_device

HERE = Path(__file__).parent
ROWS = ("attention", "aft_simple", "aft_conv_k7", "hydra", "external")
SIZES = (32, 40, 48, 64)
READ = 1000  # images whose tokens are dissected
HYDRA = {"name": "hydra"}
CONV = {"name": "aft_conv", "heads": 32, "kernel_size": 7, "qkv_bias": False}
TUNED = ("attention", "hydra, last 2", "hydra, last 3", "hydra, last 6", "hydra, every second", "aft_conv 7 x 7")
RATE = 0.25  # of the rates that the softmax model was trained with
BATCH = 128


def run_of(sweep: Path, row: str) -> Path:
    """Return the final run of a row with seed 0."""
    (found,) = sweep.glob(f"**/final/{row}/rate_*_seed_0")
    return found


def swaps(config: Any) -> dict[str, Any]:
    """Return the models that the softmax model is converted to."""
    layers = config.layers
    found = {f"hydra, last {k}": replace_layers(config, HYDRA, last=k) for k in range(1, layers + 1)}
    found |= {"hydra, every second": replace_layers(config, HYDRA, every=2)}
    return {"attention": config, **found, "aft_conv 7 x 7": replace(config, mixers=(CONV,), positions=None)}


def top1(model: Any, config: RunConfig, images: int, size: int | None = None) -> float:
    """Return the share of test images that a model classifies rightly."""
    device = next(model.parameters()).device
    task = open_task(replace(config, train=replace(config.train, device=device.type)), None)
    return round(task.evaluate(model.eval(), "test", max_images=images, image_size=size).top1, 4)


def on_data(config: RunConfig, data: str) -> RunConfig:
    """Return a run's config that reads its images from here."""
    return replace(config, data=replace(config.data, path=str(Path(data).resolve())))


def anatomy(run: Path, data: str) -> dict[str, Any]:
    """Return how large the norms of a model's tokens are, and what one token tells."""
    subject = open_subject(str(run))
    seen = dissect(subject, load_images([data], subject, limit=READ)).to_json()
    kept = {name: seen[name] for name in ("norm_median", "norm_largest", "cutoff", "outliers")}
    probes = {"similarity": seen["similarity"]["others"], "position": seen["probes"]["position"]["others"]}
    return {
        name: round(value, 4)
        for name, value in (kept | probes | {"pixels": seen["probes"]["pixels"]["others"]}).items()
    } | {"class": seen["classified"]["accuracy"]}


def main() -> None:
    """Measure, and write benchmarks/results/converged_vit.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=10_000, help="test images to score")
    parser.add_argument("--tune", type=int, default=0, help="steps of further training")
    args = parser.parse_args()
    device, file = pick_device("auto"), HERE / "results/converged_vit.json"
    found: dict[str, Any] = {"anatomy": {}, "sizes": {}, "swapped": {}, "tuned": {}}
    found |= json.loads(file.read_text()) if file.is_file() else {}
    if found.get("images", args.images) != args.images:
        parser.error(f"{file} holds scores of {found['images']} images; give --images {found['images']}, or delete it")
    name = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
    found |= {"machine": name, "torch": torch.__version__, "images": args.images}
    for row in ROWS:
        if row not in found["anatomy"]:
            found["anatomy"][row] = anatomy(run_of(args.sweep, row), args.data)
            write_json(file, found)
            print(row, found["anatomy"][row], flush=True)
        if row in found["sizes"]:
            continue
        model, config = load_run(run_of(args.sweep, row), device=device.type)
        config = on_data(config, args.data)
        own = not model.fixed_size  # else learned positions are stretched, as ViT.resize does
        scores = {}
        for size in SIZES:
            if size != SIZES[0] and not own:
                model, _ = load_run(run_of(args.sweep, row), device=device.type)
                model.resize((size, size))
            scores[str(size)] = top1(model, config, args.images, size)
        found["sizes"][row] = {"stretched": not own, "top1": scores}
        write_json(file, found)
        print(row, found["sizes"][row], flush=True)
    start = run_of(args.sweep, "attention")
    softmax, config = load_run(start, device="cpu")
    config = on_data(config, args.data)
    for row, target in swaps(softmax.config).items():
        model, _ = convert_vit(str(start), target, seed=0)
        if row not in found["swapped"]:
            found["swapped"][row] = top1(model.to(device), config, args.images)
            write_json(file, found)
            print(row, found["swapped"][row], flush=True)
        if not args.tune or row not in TUNED or row in found["tuned"]:
            continue
        found["tuned"][row] = {"top1": tuned(model, config, args), "steps": args.tune, "batch": BATCH, "rate": RATE}
        write_json(file, found)
        print(row, found["tuned"][row], flush=True)


def tuned(model: Any, config: RunConfig, args: argparse.Namespace) -> float:
    """Train a converted model further and return its top-1 on the test images."""
    from safetensors.torch import save_file

    begin = args.out / "start"
    begin.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), begin / "model.safetensors")
    write_json(begin / "config.json", model.config.to_json())
    optim = replace(config.optim, lr=config.optim.lr * RATE, muon_lr=config.optim.muon_lr * RATE, warmup=20)
    loop = replace(
        config.train, steps=args.tune, batch_size=BATCH, init=str(begin), eval_every=args.tune, save_every=args.tune
    )
    out = args.out / f"{len(list(args.out.iterdir()))}"
    train(replace(config, model=model.config, optim=optim, train=loop, row=""), out, verbose=False)
    trained, own = load_run(out, device=pick_device("auto").type)
    return top1(trained, own, args.images)


if __name__ == "__main__":
    main()
