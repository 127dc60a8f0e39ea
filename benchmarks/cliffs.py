"""Time shapes at which `auto` once fell far below the better of its two paths.

The shapes have few tokens, wide heads, or heads of one feature.

    python -m benchmarks.cliffs            # print the table, one thread
    python -m benchmarks.cliffs --record   # and keep it in results/cliffs.json

Each row times `auto`, the eager form and the C kernel by name in turns, in one process. The share compares `auto` with
the better of the other two, by minima.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from tokenmix import functional
from tokenmix.lab.bench.roofline import machine

RECORD = Path(__file__).parent / "results" / "cliffs.json"
BACKENDS = ("auto", "eager", "cpu")
ROWS: dict[str, tuple[str, tuple[int, int, int, int], bool]] = {
    "linear, one token": ("linear", (64, 1, 512, 8), False),
    "linear, one token, causal": ("linear", (64, 1, 512, 8), True),
    "linear, 16 tokens": ("linear", (64, 16, 512, 8), False),
    "linear, one token, one wide head": ("linear", (16, 1, 2048, 1), False),
    "linear, heads of one feature": ("linear", (8, 64, 512, 512), False),
    "linear, heads of one feature, causal": ("linear", (8, 64, 512, 512), True),
    "linear, heads of one feature, long": ("linear", (1, 1024, 64, 64), False),
    "linear, one wide head": ("linear", (1, 256, 2048, 1), False),
    "linear, ordinary heads": ("linear", (4, 1024, 512, 8), False),
    "aft_full, one token": ("aft_full", (64, 1, 512, 1), False),
    "aft_full, two tokens": ("aft_full", (64, 2, 512, 1), False),
    "aft_full, 8 tokens": ("aft_full", (64, 8, 512, 1), False),
    "aft_conv 31, a filter per feature, causal": ("aft_conv", (8, 64, 512, 512), True),
}
"""Title -> operation; batch, tokens, features, heads; whether causal."""

Call = Callable[[str], Tensor]


def row(op: str, sizes: tuple[int, int, int, int], causal: bool) -> tuple[list[Tensor], Call]:
    """Return the tensors of a row, and its call by name of the backend."""
    random = torch.Generator().manual_seed(0)
    B, T, D, heads = sizes
    q, k, v = (torch.randn(B, T, D, generator=random) for _ in range(3))
    if op == "linear":
        return [q, k, v], lambda backend: functional.linear_attention(
            q, k, v, heads=heads, causal=causal, backend=backend
        )
    if op == "aft_full":
        w = torch.randn(T, T, generator=random)
        return [q, k, v, w], lambda backend: functional.aft_full(q, k, v, w, causal=causal, backend=backend)
    k, w = k[..., :heads].contiguous(), torch.randn(heads, 31, generator=random)
    return [q, k, v, w], lambda backend: functional.aft_conv(q, k, v, w, causal=causal, backend=backend)


def measured(
    op: str, sizes: tuple[int, int, int, int], causal: bool, backward: bool, budget: float
) -> dict[str, float]:
    """Return the least milliseconds of each backend, taking turns; the first call of each is not timed."""
    leaves, call = row(op, sizes, causal)
    g = torch.randn_like(leaves[0])
    for leaf in leaves:
        leaf.requires_grad_(backward)
    least, start, turns = dict.fromkeys(BACKENDS, float("inf")), time.perf_counter(), 0
    drawn = Random(0)
    while turns < 24 or time.perf_counter() - start < budget:
        backend, *before = drawn.choices(BACKENDS, k=1) + drawn.choices(BACKENDS, weights=(2, 2, 1), k=2)
        for warm, name in (
            (True, before[0]),
            (True, before[1]),
            (False, backend),
        ):  # each is timed after each: a call leaves the caches to the next
            begin = time.perf_counter()
            with torch.set_grad_enabled(backward):
                y = call(name)
            if backward:
                torch.autograd.grad(y, leaves, g)
            if turns >= 3 and not warm:
                least[name] = min(least[name], 1e3 * (time.perf_counter() - begin))
        turns += 1
    return least


def main() -> int:
    """Measure all rows and print them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cliffs", description="auto beside its two paths where it once fell behind."
    )
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--budget", type=float, default=1.5, help="seconds for each row and pass")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine(), "unit": "milliseconds, minimum", "rows": []}
    print(f"{'':44}{'pass':18}{'auto':>9}{'eager':>9}{'kernel':>9}{'share':>7}")
    for title, (op, sizes, causal) in ROWS.items():
        for backward in (False, True):
            name, least = (
                "forward+backward" if backward else "forward",
                measured(op, sizes, causal, backward, args.budget),
            )
            share = min(least["eager"], least["cpu"]) / least["auto"]
            print(
                f"{title:44}{name:18}{least['auto']:9.3f}{least['eager']:9.3f}{least['cpu']:9.3f}{share:7.2f}",
                flush=True,
            )
            found["rows"].append(
                {
                    "row": title,
                    "op": op,
                    "sizes": sizes,
                    "causal": causal,
                    "pass": name,
                    **least,
                    "share_of_better": share,
                }
            )
    if args.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
