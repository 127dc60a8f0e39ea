"""Measure whole models at lengths where attention is expensive, before and after it is replaced.

A ViT runs at 1024 x 1024 pixels, and a BERT-shaped encoder at 16k tokens.

    python benchmarks/surgery_long.py [--budget 10] [--threads 2] [--rows vit bert]

Random weights; the encoder is a small BERT (4 layers, 256 features, 4 heads), and the ViT is timm's small one. Seconds
and peak memory of one forward pass of one input, with the models taking turns in one process. Written to
benchmarks/results/surgery_long.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tokenmix.hosts import replace_mixers
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.bench.timing import measure, peak_memory, sampler
from tokenmix.system.torchvision import ensure_torchvision
from whole_models import RESULTS

SIDE, LENGTH = 1024, 16384
MIXERS: dict[str, dict[str, Any]] = {
    "hydra": {"name": "hydra"},
    "aft_simple": {"name": "aft_simple"},
    "linear": {"name": "linear"},
}


def vit() -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """Build timm's small ViT and its call."""
    ensure_torchvision()
    import timm

    model = timm.create_model("vit_small_patch16_224", img_size=SIDE).eval()
    image = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    return model, lambda m: m(image)


def bert() -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """Build a BERT of transformers and its call."""
    ensure_torchvision()
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = BertModel(
        BertConfig(vocab_size=1000, max_position_embeddings=LENGTH, **sizes), add_pooling_layer=False
    ).eval()
    ids = torch.randint(0, 1000, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    return model, lambda m: m(ids)


HOSTS = {"vit": vit, "bert": bert}


def rows(make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Any]]], budget: float) -> dict[str, Any]:
    """Return name -> seconds, speed relative to the untouched model, and MiB of one pass."""
    torch.manual_seed(0)
    model, call = make()
    models = {"attention": model}
    for name, spec in MIXERS.items():
        models[f"{name}, all"] = replace_mixers(model, {"*": spec}, seed=0)[0].eval()
        models[f"{name}, every other"] = replace_mixers(model, {"*": spec}, every=2, seed=0)[0].eval()
    calls = {name: torch.no_grad()(partial(call, one)) for name, one in models.items()}
    times = measure({name: sampler(one) for name, one in calls.items()}, budget=budget)
    base = times["attention"].wall
    return {
        name: {"seconds": t.wall, "speedup": base / t.wall, "peak_MiB": (peak_memory(calls[name]) or 0) / 2**20}
        for name, t in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of measuring per host")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", nargs="*", choices=list(HOSTS), default=list(HOSTS))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found: dict[str, Any] = {
        "machine": machine(),
        "threads": given.threads,
        "side": SIDE,
        "length": LENGTH,
        "hosts": {},
    }
    for host in given.rows:
        found["hosts"][host] = rows(HOSTS[host], given.budget)
        for name, row in found["hosts"][host].items():
            print(
                f"{host:5} {name:24}{row['seconds']:8.3f} s  {row['speedup']:5.2f}x  {row['peak_MiB']:7.0f} MiB",
                flush=True,
            )
        RESULTS.joinpath("surgery_long.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
