"""Measure how the time and the memory of a layer grow with tokens and with features.

    python -m benchmarks.scaling            # print the tables, about four minutes
    python -m benchmarks.scaling --record   # and keep them in results/scaling.json, from which the charts are drawn

A layer is a mixer with its projections, batch 1, float32, forward with backward, with one head for 64 features. The
rows of one size take turns in one process. Memory is the peak of a call beyond what was there before it. Attention is
torch's fused kernel, and unfused its plain products, which keep a matrix of pairs for each head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmix import MIXERS, build_mixer, use_backend
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.bench.timing import measure, peak_memory, sampler

RECORD = Path(__file__).parent / "results" / "scaling.json"
TOKENS, FEATURES = (256, 1024, 4096, 16384), (64, 128, 256, 512, 1024)
AT = {"tokens": 1024, "features": 256}
"""The number of the one while the other grows."""
PAIRS = 2**27
"""The most pairs of tokens, counted in every head, for which rows that store all pairs are measured."""


class Row(NamedTuple):
    """A layer: its spec, whether it is causal, and whether it keeps a matrix of pairs."""

    spec: dict[str, Any]
    heads: bool = False
    causal: bool = True
    pairs: bool = False


ROWS = {
    "attention, fused": Row({"name": "attention"}, heads=True),
    "attention, unfused": Row({"name": "attention"}, heads=True, pairs=True),
    "AFT-full": Row({"name": "aft_full", "rank": 32}),
    "AFT-local, window 32": Row({"name": "aft_local", "window": 32}),
    "AFT-conv, kernel 31": Row({"name": "aft_conv", "kernel_size": 31}, heads=True),
    "AFT-simple": Row({"name": "aft_simple"}),
    "AFT-forget": Row({"name": "aft_forget"}),
    "Hydra": Row({"name": "hydra"}),
    "Hydra, mean": Row({"name": "hydra", "feature": "mean"}),
    "Hydra, tanh": Row({"name": "hydra", "feature": "tanh"}),
    "Hydra, sigmoid and softmax": Row({"name": "hydra", "feature": "sigmoid/softmax"}),
    "linear attention": Row({"name": "linear"}, heads=True),
    "Gated DeltaNet": Row({"name": "gated_delta"}, heads=True),
    "Performer": Row({"name": "performer"}, heads=True),
    "Reformer": Row({"name": "reformer"}, heads=True),
    "Linformer, both directions": Row({"name": "linformer"}, heads=True, causal=False),
    "Synthesizer, dense": Row({"name": "synthesizer_dense"}, heads=True, pairs=True),
    "lightweight convolution": Row({"name": "lightconv"}, heads=True),
}


def build_step(row: Row, T: int, D: int) -> Callable[[], None]:
    """Return a call of a layer, forward with backward."""
    torch.manual_seed(0)
    spec = row.spec | ({"heads": max(1, D // 64)} if row.heads else {})
    if "max_len" in signature(MIXERS[spec["name"]]).parameters:
        spec["max_len"] = T
    layer: nn.Module = build_mixer(dim=D, causal=row.causal, **spec)
    x, g = torch.randn(1, T, D, requires_grad=True), torch.randn(1, T, D)
    leaves: list[Tensor] = [x, *layer.parameters()]

    def step() -> None:
        torch.autograd.grad(layer(x), leaves, g, allow_unused=True)

    return step


def measure_size(T: int, D: int, budget: float) -> dict[str, Any]:
    """Return name -> milliseconds and MiB of each row at one size."""
    kept = {n: r for n, r in ROWS.items() if not r.pairs or T * T * max(1, D // 64) <= PAIRS}
    steps = {name: build_step(row, T, D) for name, row in kept.items()}
    scopes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        name: partial(use_backend, "eager") if name == "attention, unfused" else nullcontext for name in kept
    }
    for name, step in steps.items():  # what is allocated once
        with scopes[name]():
            step()
    memory = {name: peak_memory(step, scope=scopes[name]) for name, step in steps.items()}
    times = measure({name: sampler(step, scope=scopes[name]) for name, step in steps.items()}, budget=budget)
    return {name: {"ms": 1e3 * times[name].wall, "MiB": (memory[name] or 0) / 2**20} for name in kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of timing for each size")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found: dict[str, Any] = {"machine": machine(), "threads": given.threads, "at": AT, "tokens": {}, "features": {}}
    sizes = [("tokens", T, AT["features"]) for T in TOKENS] + [("features", AT["tokens"], D) for D in FEATURES]
    for what, T, D in sizes:
        rows = measure_size(T, D, given.budget)
        found[what][str(T if what == "tokens" else D)] = rows
        print(f"\n{T:,} tokens of {D} features")
        for name, row in rows.items():
            print(f"  {name:28}{row['ms']:10.2f} ms {row['MiB']:10.1f} MiB", flush=True)
        if given.record:
            RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
