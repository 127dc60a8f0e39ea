r"""Train one small ViT on CIFAR-10 at 32 x 32 with attention, AFT, Hydra and External attention.

All see the same tokens of the same images. Fine-tuning, one-tap filters and registers follow.

    python benchmarks/vision_small.py --data cifar10 --out runs/vision_small \
        [--only classify finetune one_hot registers] [--rows attention ...] [--jobs 2]
    python benchmarks/vision_small.py --out runs/vision_small --results benchmarks/results/vision_small

Each row trains in its own process and run directory with one thread. A row that has finished is not run again; one that
was stopped continues. ``--data`` is a set's name or a path, as everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from image_rows import data_source, finish, keep_result, run_rows
from tokenmix.lab.data import Augment
from tokenmix.lab.recipes.images import CIFAR_MEAN, CIFAR_STD
from tokenmix.lab.train import ImageDataConfig, OptimConfig, RunConfig, TrainConfig, evaluate_run, load_run
from tokenmix.models import ViTConfig, replace_layers

DIM, LAYERS, PATCH, BATCH = 96, 6, 4, 64
STEPS, TUNING_STEPS, REGISTER_STEPS = 1200, 600, 600
RATE, TUNING_RATE = 2e-3, 1e-3
LARGER = (32, 40, 48, 64)  # test sizes of models without parameters per position
FILTER_RATES = 20.0  # times the rate, for filters that are to end as one tap
HYDRA = {"name": "hydra"}


def vit(*mixers: dict[str, Any], **options: Any) -> ViTConfig:
    """Return the config that all rows share."""
    return ViTConfig(
        dim=DIM,
        layers=LAYERS,
        mixers=mixers,
        image_size=(32, 32),
        patch=PATCH,
        classes=10,
        **{"pool": "mean", **options},
    )


def conv(kernel_size: int, **options: Any) -> ViTConfig:
    """Return the config of AFT-conv, fully convolutional."""
    spec = {"name": "aft_conv", "heads": 32, "kernel_size": kernel_size, "qkv_bias": False, **options}
    return vit(spec, positions=None)


ATTENTION = vit({"name": "attention", "heads": 3})
ROWS: dict[str, ViTConfig] = {
    "attention": ATTENTION,
    "aft_full": vit({"name": "aft_full", "rank": 32, "qkv_bias": False}),
    "aft_simple": vit({"name": "aft_simple"}),
    "aft_conv_k3": conv(3),
    "aft_conv_k7": conv(7),
    "aft_conv_k11": conv(11),
    "aft_conv_k7_no_query": conv(7, gate=None),
    "aft_conv_k7_raw": conv(7, reparam=False),
    "aft_conv_k7_window": conv(7, outside="none"),
    "hydra": vit(HYDRA),
    "hydra_last_3": replace_layers(ATTENTION, HYDRA, last=3),
    "external": vit({"name": "external", "slots": 64}),
}
TUNED = {
    "finetune/aft_conv": ROWS["aft_conv_k7"],
    "finetune/hydra_last_3": ROWS["hydra_last_3"],
    "finetune/hydra": ROWS["hydra"],
}
REGISTERS = {f"registers/{n}": replace(ATTENTION, pool="class", registers=n) for n in (0, 1, 4, 8)}


def config_of(row: str, data: str) -> RunConfig:
    """Return the run of a row."""
    part, _, name = row.partition("/")
    model, steps, rate, more = ROWS.get(row), STEPS, RATE, {}
    if part in ("finetune", "random"):
        model, steps, rate = TUNED[f"finetune/{name}"], TUNING_STEPS, TUNING_RATE
    elif part in ("one_hot", "one_hot_tuned"):
        model, more = ROWS["aft_conv_k7"], {"one_hot": float(name)}
        steps, rate = (STEPS, RATE) if part == "one_hot" else (TUNING_STEPS, TUNING_RATE)
    elif part in ("one_tap", "one_tap_tuned"):
        model, more = ROWS["aft_conv_k7_raw"], {"one_hot": float(name), "mixer_lr": FILTER_RATES}
        rate = RATE if part == "one_tap" else TUNING_RATE
    elif part == "registers":
        model, steps = REGISTERS[row], REGISTER_STEPS
    images = ImageDataConfig(
        **data_source(data), augment=Augment(crop="pad", pad=4, flip=0.5), mean=CIFAR_MEAN, std=CIFAR_STD
    )
    optim = OptimConfig(lr=rate, weight_decay=0.05, warmup=100, min_lr_ratio=0.01, **more)
    often: dict[str, Any] = {
        "log_every": 50,
        "eval_every": 300,
        "save_every": 150,
        "keep": 4 if part == "registers" else 1,
    }
    loop = TrainConfig(steps=steps, batch_size=BATCH, threads=1, eval_batch=256, eval_images=2000, **often)
    return RunConfig(model, images, optim, loop, recipe="vision_small", row=row)


def run_row(row: str, data: str, out: Path) -> None:
    """Train a row to its end and score it on the test images, also at larger sizes where the model takes them."""
    folder, config = out / row, config_of(row, data)
    if row.startswith("finetune/"):
        config = replace(config, train=replace(config.train, init=str(converted(config.model, out, row))))
    if "_tuned/" in row:
        config = replace(
            config,
            train=replace(
                config.train, init=str(out / ("aft_conv_k7" if row.startswith("one_hot") else "aft_conv_k7_raw"))
            ),
        )
    summary = finish(folder, config)
    model, _ = load_run(folder)
    sizes = (32,) if model.fixed_size else LARGER
    scores = {
        size: evaluate_run(
            folder, image_size=size, max_images=None if size == 32 else 5000, device="cpu", record=size == 32
        ).top1
        for size in sizes
    }
    keep_result(
        folder,
        summary,
        parameters=sum(p.numel() for p in model.parameters()),
        test_top1={str(size): score for size, score in scores.items()},
    )


def converted(config: ViTConfig, out: Path, row: str) -> Path:
    """Carry the weights of the attention run into another model, as ``tokenmix convert`` does."""
    from tokenmix.hosts.vit.convert import convert_command

    folder = out / "converted" / row
    if not (folder / "config.json").exists():
        convert_command(str(out / "attention"), config, folder)
    return folder


PARTS = {
    "classify": list(ROWS),
    "finetune": [name.replace("finetune", kind) for name in TUNED for kind in ("finetune", "random")],
    "one_hot": ["one_hot/0.01", "one_hot/0.1", "one_hot_tuned/10", "one_tap/1", "one_tap_tuned/1"],
    "registers": list(REGISTERS),
}

if __name__ == "__main__":
    run_rows(__file__, __doc__ or "", PARTS, run_row)
