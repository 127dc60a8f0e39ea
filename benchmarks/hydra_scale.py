"""Measure Hydra attention at scale (arXiv 2209.07484), as whole DeiT-B models and by number of heads.

DeiT-B runs from 224 to 1920 x 1088; memory is measured against the number of heads (Fig. 2).

    python benchmarks/hydra_scale.py [--budget 30] [--threads 2] [--again]

First table: seconds and peak memory of one image through DeiT-B with softmax attention (torch's fused SDPA; unfused
products, the paper's baseline), Hydra in the last two layers and Hydra in all, taking turns in one process. Second:
peak memory of a forward and backward pass of one DeiT-B block at 224, batch 8, with softmax attention and with linear
attention, from 1 to 768 heads. Written to benchmarks/results/hydra_scale.json after each size; existing figures from a
machine of this kind are not measured again, unless with --again.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.bench.timing import measure, peak_memory, sampler
from tokenmix.models import Block, build_model
from tokenmix.models.macs import macs
from whole_models import RESULTS, UNFUSED_BYTES, Unfused

SIZES = ((224, 224), (384, 384), (448, 448), (720, 1280), (1088, 1920))
MODELS = {
    "attention, fused SDPA": "deit_base",
    "attention, unfused": "deit_base",
    "hydra, last 2": "hydra_deit_base_last2",
    "hydra": "hydra_deit_base",
}
HEADS = (1, 2, 3, 4, 6, 12, 24, 48, 96, 192, 384, 768)
DIM, TOKENS, BATCH = 768, 197, 8
MOST_BYTES = 10 * 2**30


def at_size(size: tuple[int, int], budget: float) -> dict[str, Any]:
    """Return name -> seconds per image, MiB, MACs, and speed relative to fused attention."""
    tokens = 1 + (size[0] // 16) * (size[1] // 16)
    image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], Any]] = {}
    work = {}
    for name, model_name in MODELS.items():
        if "unfused" in name and 3 * 4 * 12 * tokens**2 > UNFUSED_BYTES:
            continue
        torch.manual_seed(0)
        model = build_model(model_name, image_size=size).eval()
        calls[name] = torch.no_grad()(partial(model, image))
        work[name] = macs(model, size).total
    scopes = {name: partial(Unfused, "unfused" in name) for name in calls}
    times = measure({name: sampler(call, scope=scopes[name]) for name, call in calls.items()}, budget=budget)
    memory = {name: peak_memory(call, scope=scopes[name]) for name, call in calls.items()}
    base = times["attention, fused SDPA"].wall
    rows = {
        n: {
            "seconds": t.wall,
            "ratio_to_fused": base / t.wall,
            "peak_MiB": (memory[n] or 0) / 2**20,
            "GMACs": work[n] / 1e9,
        }
        for n, t in times.items()
    }
    return {"tokens": tokens, "rows": rows}


def by_heads() -> dict[str, dict[int, float | None]]:
    """Measure peak MiB of a training step of one block; None where the T x T weights of all heads do not fit."""
    x = torch.randn(BATCH, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    found: dict[str, dict[int, float | None]] = {"softmax, unfused": {}, "softmax, fused": {}, "linear, cosine": {}}
    for heads in HEADS:
        for name in found:
            if name == "softmax, unfused" and 4 * 4 * BATCH * heads * TOKENS**2 > MOST_BYTES:
                found[name][heads] = None
                continue
            spec = {"name": "multihead_linear" if name.startswith("linear") else "attention", "heads": heads}
            block = Block(DIM, spec, causal=False, max_len=TOKENS)

            def step(block: Block = block) -> None:
                block(x).square().mean().backward()

            with Unfused(name.endswith("unfused")):
                step()
                found[name][heads] = (peak_memory(step) or 0) / 2**20
            del block
            gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of measuring per size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    common = {"machine": machine(), "threads": given.threads, "dtype": "float32"}
    found = {"sizes": {}, **common} if given.again else kept(common)
    for size in SIZES:
        label = f"{size[1]}x{size[0]}"
        if label not in found["sizes"]:
            found["sizes"][label] = at_size(size, given.budget)
            keep(found)
        print(label, f"T={found['sizes'][label]['tokens']}")
        for name, row in found["sizes"][label]["rows"].items():
            print(
                f"  {name:24}{row['seconds']:8.3f} s  {row['ratio_to_fused']:5.2f}x  "
                f"{row['peak_MiB']:8.0f} MiB  {row['GMACs']:8.1f} GMACs",
                flush=True,
            )
    if "heads" not in found:
        found["heads"] = by_heads()
        keep(found)
    for name, row in found["heads"].items():
        print(
            f"{name:18}",
            "  ".join(f"{h}: {'does not fit' if m is None else f'{m:.0f}'}" for h, m in row.items()),
            "MiB",
        )


def kept(common: dict[str, Any]) -> dict[str, Any]:
    """Read what an earlier run on this machine has written, or start afresh."""
    path = RESULTS.joinpath("hydra_scale.json")
    found = json.loads(path.read_text()) if path.exists() else {}
    alike = [
        {
            "threads": one.get("threads"),
            **{name: one.get("machine", {}).get(name) for name in ("device", "cores", "torch", "kernels")},
        }
        for one in (found, common)
    ]
    return found if alike[0] == alike[1] else {"sizes": {}, **common}


def keep(found: dict[str, Any]) -> None:
    """Write what has been measured so far."""
    RESULTS.joinpath("hydra_scale.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
