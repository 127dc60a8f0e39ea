"""Measure whole models in training: steps per second and peak memory of one architecture with different mixers.

The models take turns in one process. ``python benchmarks/whole_models.py lm`` is the 24 x 256 byte model of the AFT
paper's enwik8 experiments (Table 4) at T = 1,024 and 4,096; ``vision`` is a stack of transformer blocks of DeiT-tiny's
shape (12 x 192, 3 heads) on grids of 14 x 14 to 68 x 120 tokens. A step is forward, backward and AdamW. Softmax
attention appears as torch's fused SDPA, as its unfused products (a T x T matrix per head, the paper's baseline), and in
a sliding window of 32 tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmix.kernels import backend as _backend
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.bench.timing import measure, peak_memory, sampler
from tokenmix.mixers import Mixer
from tokenmix.mixers.attention import Attention
from tokenmix.mixers.base import Inputs
from tokenmix.models import LM, LMConfig
from tokenmix.models.blocks import Block

RESULTS = Path(__file__).parent / "results"


class Row(NamedTuple):
    """Hold a mixer's spec, and how it runs."""

    spec: dict[str, Any]
    unfused: bool = False  # attention as plain products
    band: int | None = None  # attention with the mask of a causal sliding window of so many tokens
    free: bool = False  # q, k and v multiplied in place of the mixing: what no mixer with these projections can beat


LM_ROWS = {
    "attention, fused SDPA": Row({"name": "attention", "heads": 4}),
    "attention, unfused": Row({"name": "attention", "heads": 4}, unfused=True),
    "window of 32, SDPA with a mask": Row({"name": "attention", "heads": 4}, band=32),
    "window of 32, our local attention": Row({"name": "local", "heads": 4, "window": 32}),
    "aft_local 32": Row({"name": "aft_local", "window": 32}),
    "aft_simple": Row({"name": "aft_simple"}),
    "aft_full": Row({"name": "aft_full"}),
    "hydra": Row({"name": "hydra"}),
    "linear": Row({"name": "linear", "heads": 4}),
    "no mixing": Row({"name": "aft_simple"}, free=True),
}
VISION_ROWS = {
    "attention, fused SDPA": Row({"name": "attention", "heads": 3}),
    "attention, unfused": Row({"name": "attention", "heads": 3}, unfused=True),
    "aft_conv 11, 32 heads": Row({"name": "aft_conv", "heads": 32, "kernel_size": 11, "ndim": 2}),
    "hydra": Row({"name": "hydra"}),
    "aft_simple": Row({"name": "aft_simple"}),
}
GRIDS = {(14, 14): 8, (24, 24): 4, (28, 28): 4, (45, 80): 1, (68, 120): 1}
"""(H, W) and the batch: 224, 384 and 448 pixels square, 1280 x 720 and 1920 x 1088, in patches of 16."""
UNFUSED_BYTES = 6 * 2**30
"""The unfused form keeps a few T x T matrices per head and layer; beyond this it is left out, and the table says so."""


class Stack(nn.Module):
    """Stack blocks of DeiT-tiny's shape over tokens (B, T, 192) on a grid."""

    def __init__(self, spec: dict[str, Any], tokens: int, dim: int = 192, depth: int = 12):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, spec, causal=False, max_len=tokens) for _ in range(depth))
        self.on_grid = spec["name"] == "aft_conv"

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        given = {"grid": grid} if self.on_grid else {}
        for block in self.blocks:
            x = x + block.mixer(block.mixer_norm(x), **given)
            x = x + block.mlp(block.mlp_norm(x))
        return x


class Unfused:
    """Compute attention as plain products while inside."""

    def __init__(self, wanted: bool):
        self.wanted = wanted

    def __enter__(self) -> None:
        self.before = _backend._default
        if self.wanted:
            _backend._default = "eager"

    def __exit__(self, *why: Any) -> None:
        _backend._default = self.before


def step_of(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Return one step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def language(length: int, batch: int, names: Collection[str] = LM_ROWS) -> dict[str, Callable[[], None]]:
    """Return a step of the 24 x 256 model with each of the named mixers."""
    tokens = torch.randint(256, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    steps = {}
    for name in names:
        row = LM_ROWS[name]
        torch.manual_seed(0)
        model = LM(LMConfig(dim=256, max_len=length, mixers=(row.spec,), layers=24))
        if row.band:
            within(model, row.band, length)
        for layer in model.modules():
            if row.free and isinstance(layer, Mixer):
                layer.mix = partial(multiply_values, layer)

        def loss(model: nn.Module = model) -> Tensor:
            return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        steps[name] = step_of(model, loss)
    return steps


def multiply_values(layer: Mixer, inputs: Inputs) -> Tensor:
    """Return sigmoid(q) (k + v) in place of what a mixer computes between its projections."""
    (q, k, v), _ = layer.functional_args(inputs)
    return layer.out_proj(torch.sigmoid(q) * (k + v))


def within(model: nn.Module, window: int, length: int) -> None:
    """Give every layer of attention the mask of a causal sliding window, as one writes it with SDPA.

    FlexAttention has no backward pass on a CPU.
    """
    band = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.forward = partial(layer.forward, attn_mask=band)


def vision(grid: tuple[int, int], batch: int) -> dict[str, Callable[[], None]]:
    """Return a step of the stack with each mixer."""
    T = grid[0] * grid[1]
    x = torch.randn(batch, T, 192, generator=torch.Generator().manual_seed(0))
    steps = {}
    for name, row in VISION_ROWS.items():
        torch.manual_seed(0)
        model = Stack(row.spec, T)
        steps[name] = step_of(model, lambda model=model: model(x, grid).square().mean())
    return steps


def table(
    rows: dict[str, Row], steps: dict[str, Callable[[], None]], budget: float, left_out: set[str]
) -> dict[str, Any]:
    """Return name -> steps per second, MiB at the peak of a step, and ratio to fused attention."""
    scopes = {name: partial(Unfused, row.unfused) for name, row in rows.items()}
    kept = {name: step for name, step in steps.items() if name not in left_out}
    memory = {name: peak_memory(step, scope=scopes[name]) for name, step in kept.items()}
    times = measure({name: sampler(step, scope=scopes[name]) for name, step in kept.items()}, budget=budget)
    base = times["attention, fused SDPA"].wall
    return {
        name: {
            "it/s": 1 / t.wall,
            "cpu_seconds": t.cpu,
            "ratio_to_fused": base / t.wall,
            "peak_MiB": (memory[name] or 0) / 2**20,
        }
        for name, t in times.items()
    } | {name: None for name in left_out}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lm", "vision"])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of measuring per size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", nargs="+", choices=LM_ROWS, help="lm: these rows alone, kept in a file of their own")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found: dict[str, Any] = {"machine": machine(), "threads": given.threads, "dtype": "float32", "tables": {}}
    sizes = [(1024, 2), (4096, 1)] if given.what == "lm" else list(GRIDS.items())
    for size, batch in sizes:
        T = size if isinstance(size, int) else size[0] * size[1]
        models, layers, heads = (LM_ROWS, 24, 4) if given.what == "lm" else (VISION_ROWS, 12, 3)
        models = {name: row for name, row in models.items() if not given.rows or name in given.rows}
        left_out = (
            {name for name, row in models.items() if row.unfused}
            if 3 * 4 * batch * heads * layers * T * T > UNFUSED_BYTES
            else set()
        )
        steps = language(T, batch, models) if isinstance(size, int) else vision(size, batch)
        label = f"T={T}, batch {batch}" if isinstance(size, int) else f"{size[0]}x{size[1]}, batch {batch}"
        found["tables"][label] = rows = table(models, steps, given.budget, left_out)
        print(label)
        for name, row in rows.items():
            print(
                f"  {name:34}"
                + (
                    f"{row['it/s']:8.3f} it/s  {row['ratio_to_fused']:5.2f}x fused  {row['peak_MiB']:8.0f} MiB"
                    if row
                    else " left out: T x T does not fit"
                )
            )
        name = f"whole_models_{given.what}{'_rows' * bool(given.rows)}.json"
        RESULTS.joinpath(name).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
