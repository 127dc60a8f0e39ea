"""Measure models of images by name, and timm's ResNets beside them: parameters, multiply-accumulates, speed, memory.

    python benchmarks/image_models.py [--batch 8] [--threads 2]

Two groups, of DeiT-tiny's size with ResNet-18 and of DeiT-small's with ResNet-50, on random images of 224 x 224; within
a group the models take turns in one process. Inference is one forward pass, training one forward and backward pass.
Written to benchmarks/results/image_models.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.bench.timing import measure, peak_memory, sampler
from tokenmix.models import build_model, macs
from tokenmix.system.torchvision import ensure_torchvision
from whole_models import RESULTS

SIZE, CLASSES = 224, 1000
GROUPS = (
    ("deit_tiny", "aft_full_tiny", "aft_conv_tiny_k11_h32", "lambda_tiny", "pvt_tiny", "eamlp_7", "timm:resnet18"),
    ("deit_small", "aft_full_small", "aft_conv_small_k11_h384", "lambda_small", "pvt_small", "timm:resnet50"),
)
"""The first of a group is what the others are compared with."""


def build(name: str) -> nn.Module:
    """Return a model of this library, or one of timm, with random weights."""
    maker, _, own = name.rpartition(":")
    if not maker:
        return build_model(own)
    ensure_torchvision()
    import timm

    return timm.create_model(own)


def giga(name: str) -> float:
    """Count the multiply-accumulates of one image, in billions: ours by ``macs``, those of timm by torch's counter."""
    with torch.device("meta"):
        model = build(name).eval()
        if not name.startswith("timm:"):
            return macs(model).total / 1e9
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, SIZE, SIZE))
    return counter.get_total_flops() / 2e9  # torch counts a multiply-accumulate as two


def calls(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Callable[[], Any]]:
    """Return one call of inference and one of training."""

    def inference() -> Tensor:
        model.eval()
        with torch.no_grad():
            return model(images)

    def training() -> None:
        model.train()
        nn.functional.cross_entropy(model(images), labels).backward()
        model.zero_grad(set_to_none=True)

    return {"inference": inference, "training": training}


def group(names: tuple[str, ...], batch: int, budget: float) -> dict[str, dict[str, float]]:
    """Return name -> figures of one group of models."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, SIZE, SIZE, generator=generator)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    torch.manual_seed(0)
    models = {name: build(name) for name in names}
    found = {
        name: {"parameters": sum(p.numel() for p in model.parameters()), "giga_macs": giga(name)}
        for name, model in models.items()
    }
    made = {name: calls(model, images, labels) for name, model in models.items()}
    for which in ("inference", "training"):
        times = measure({name: sampler(each[which]) for name, each in made.items()}, budget=budget)
        for name, each in made.items():
            found[name] |= {
                f"{which}_images_per_s": batch / times[name].wall,
                f"{which}_ratio": times[names[0]].wall / times[name].wall,
                f"{which}_peak_MiB": (peak_memory(each[which]) or 0) / 2**20,
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--budget", type=float, default=45.0, help="seconds of measuring per group and pass")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found: dict[str, Any] = {
        "machine": machine(),
        "setting": f"batch {given.batch}, {SIZE} x {SIZE}, float32",
        "images": {},
    }
    for names in GROUPS:
        found["images"] |= (rows := group(names, given.batch, given.budget))
        for name, r in rows.items():
            print(
                f"{name:24} {r['parameters'] / 1e6:6.1f}M {r['giga_macs']:6.2f}G"
                + "".join(
                    f"  {which} {r[f'{which}_images_per_s']:7.1f}/s {r[f'{which}_ratio']:5.2f}x "
                    f"{r[f'{which}_peak_MiB']:6.0f} MiB"
                    for which in ("inference", "training")
                )
            )
        RESULTS.joinpath("image_models.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
