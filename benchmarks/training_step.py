"""Time a training step of small language models against its matrix products alone.

    python -m benchmarks.training_step              # print the table
    python -m benchmarks.training_step --record     # and keep it in results/training_step.json

A step is forward, backward, clipping and the update, over byte models in the modern shell at 4,096 tokens. The limit is
the time of its matrix products at their own shapes, measured in turns with the step in one process: three per linear
layer, and for softmax attention the six of its causal half. Both are minima. The share is limit / step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.train import OptimConfig
from tokenmix.lab.train.optim import build_optimizers, update
from tokenmix.mixers import Attention
from tokenmix.models import LMConfig, build_model, in_shell

RECORD = Path(__file__).parent / "results" / "training_step.json"
LENGTH, TOKENS, TURNS = 256, 4096, 12
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"name": "attention"},
    "aft_local": {"name": "aft_local", "window": 32, "rank": 32},
    "aft_simple": {"name": "aft_simple"},
    "hydra": {"name": "hydra"},
}
SIZES = {"4 x 128": (4, 128), "8 x 256": (8, 256)}


def products(model: nn.Module) -> Callable[[], None]:
    """Return a call that makes the matrix products of a step, forward and backward, and nothing else."""
    todo: list[tuple[Tensor, Tensor]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            x, g, w = torch.randn(TOKENS, module.in_features), torch.randn(TOKENS, module.out_features), module.weight
            todo += [(x, w.detach().T), (g, w.detach()), (g.T, x)]
        if isinstance(module, Attention):
            # Half of the queries' rows stand for the causal half of the pairs.
            rows = torch.randn(TOKENS // LENGTH * module.heads, LENGTH // 2, module.head_dim)
            keys = torch.randn(rows.shape[0], LENGTH, module.head_dim)
            weights = torch.randn(rows.shape[0], LENGTH // 2, LENGTH)
            todo += [(rows, keys.mT), (weights, keys)] * 2 + [(weights.mT, rows)] * 2
    return lambda: [a @ b for a, b in todo].clear()


def stepper(model: Any, optim: OptimConfig) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return calls that make one training step, and one update alone."""
    optimizers = build_optimizers(model, optim)
    tokens = torch.randint(256, (TOKENS // LENGTH, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def update_alone() -> None:
        update(model, optimizers, optim, 0, None)

    def step() -> None:
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        update_alone()

    return step, update_alone


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def row(mixer: str, size: str, optimizer: str) -> dict[str, Any]:
    """Measure one model with one optimiser."""
    torch.manual_seed(0)
    layers, dim = SIZES[size]
    spec = MIXERS[mixer] | ({"heads": dim // 32} if mixer == "attention" else {})
    model = build_model(in_shell(LMConfig(dim=dim, max_len=LENGTH, mixers=(spec,), layers=layers), "modern"))
    optim = OptimConfig(name=optimizer, lr=1e-4, muon_lr=5e-4)
    (step, update), limit = stepper(model, optim), products(model)
    times: dict[str, list[float]] = {"step": [], "limit": [], "update": []}
    for _ in range(2):
        step(), limit()
    for _ in range(TURNS):
        times["step"].append(timed(step))
        times["limit"].append(timed(limit))
        # An update needs gradients; it is timed on those of a step of its own.
        F.cross_entropy(model(torch.zeros(1, LENGTH, dtype=torch.long))[0], torch.zeros(LENGTH).long()).backward()
        times["update"].append(timed(update))
    least = {name: min(values) for name, values in times.items()}
    return {
        "mixer": mixer,
        "size": size,
        "optimizer": optimizer,
        "threads": torch.get_num_threads(),
        "share": round(least["limit"] / least["step"], 3),
        "update": round(least["update"] / least["step"], 3),
        "tokens_per_s": round(TOKENS / least["step"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    found = []
    print("| model | mixer | optimiser | threads | products / step | update / step | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    cases = [(m, s, o) for s in SIZES for m in MIXERS for o in ("adamw", "muon") if o == "adamw" or m == "attention"]
    for threads in given.threads:
        torch.set_num_threads(threads)
        for one in starmap(row, cases):
            found.append(one)
            share, update = f"{one['share']:.0%}", f"{one['update']:.0%}"
            cells = (one["size"], one["mixer"], one["optimizer"], threads, share, update, f"{one['tokens_per_s']:,}")
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if given.record:
        RECORD.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
