"""Run one layer over a million tokens on four processes of this machine and on one: memory, time, the same gradients.

    python -m benchmarks.million_tokens [--tokens 1048576] [--ranks 4] [--dim 64] [--mixers aft_simple hydra] [--record]

Each process draws its own share of the tokens, mixes it forward and backward and sums the gradients of the parameters
over all (gloo, one thread each). Memory is the largest resident memory of a process while it does so, above what it
held before, with torch loaded, the layer built and a few tokens mixed. More processes than cores take turns, so the
time is that of this machine and no measure of scaling.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tokenmix import Mixer, build_mixer
from tokenmix.lab.bench.roofline import machine
from tokenmix.parallel import context_parallel, sum_gradients
from tokenmix.system.text import Table

RECORD = Path(__file__).parent / "results" / "million_tokens.json"
PIECE = 65536
OPTIONS: dict[str, dict[str, Any]] = {"aft_local": {"window": 32, "bias": {"name": "kerple"}}, "linear": {"heads": 4}}


def tokens(start: int, stop: int, dim: int) -> Tensor:
    """Return tokens start .. stop - 1 of the sequence (1, L, D), the same whoever draws them."""
    parts = []
    for i in range(start // PIECE, -(-stop // PIECE)):
        drawn = torch.randn(PIECE, dim, generator=torch.Generator().manual_seed(i))
        parts.append(drawn[max(start - i * PIECE, 0) : stop - i * PIECE])
    return torch.cat(parts)[None]


def resident(field: str) -> float:
    """Return a field of this process's memory, "VmRSS" or "VmHWM", in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def step(mixer: Mixer, x: Tensor) -> float:
    """Run forward and backward; return the loss of these tokens."""
    y = mixer(x)
    loss = (y * torch.linspace(-1.0, 1.0, y.shape[-1])).sum() + 0.5 * y.square().sum()
    loss.backward()
    return float(loss.detach())


def measured(rank: int, ranks: int, name: str, total: int, dim: int) -> dict[str, Any]:
    """Measure one process."""
    torch.manual_seed(0)
    mixer = build_mixer(name, dim, causal=True, **OPTIONS.get(name, {}))
    start, stop = total * rank // ranks, total * (rank + 1) // ranks

    def mix(x: Tensor) -> float:
        mixer.zero_grad()
        if ranks == 1:
            return step(mixer, x)
        with context_parallel(mixer):
            loss = step(mixer, x)
        sum_gradients(mixer)
        return loss

    mix(torch.zeros(1, 256, dim))
    idle = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest memory counts from here
    began = time.monotonic()
    loss = mix(tokens(start, stop, dim).requires_grad_())
    seconds = time.monotonic() - began
    found = {"idle_mib": idle, "above_mib": resident("VmHWM") - idle, "seconds": seconds, "loss": loss}
    return found | {"gradients": {n: p.grad for n, p in mixer.named_parameters() if p.grad is not None}}


def process(rank: int, ranks: int, folder: str, *asked: Any) -> None:
    """Be one process. It ends without the destructors of gloo, which now and then abort."""
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=10))
    torch.save(measured(rank, ranks, *asked), f"{folder}/{rank}.pt")
    if ranks > 1:
        dist.barrier()
    os._exit(0)


def run(ranks: int, name: str, total: int, dim: int) -> list[dict[str, Any]]:
    """Start the processes and return what each measured."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (ranks, folder, name, total, dim), nprocs=ranks)  # type: ignore[no-untyped-call]
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(ranks)]


def compared(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Measure one mixer on one process and on several."""
    (one,), several = (run(n, name, asked.tokens, asked.dim) for n in (1, asked.ranks))
    largest = max(float(g.abs().max()) for g in one["gradients"].values())
    off = max(float((rank["gradients"][n] - g).abs().max()) for rank in several for n, g in one["gradients"].items())
    loss = sum(rank["loss"] for rank in several)
    above = max(rank["above_mib"] for rank in several)
    return {
        "one": {n: one[n] for n in ("idle_mib", "above_mib", "seconds")},
        "ranks": [{n: rank[n] for n in ("idle_mib", "above_mib", "seconds")} for rank in several],
        "memory_share": above / one["above_mib"],
        "loss_difference": abs(loss - one["loss"]) / abs(one["loss"]),
        "gradient_difference": off / largest,
    }


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--mixers", nargs="+", default=["aft_simple", "aft_forget", "hydra", "linear"])
    parser.add_argument("--record", action="store_true", help=f"keep the numbers in {RECORD.name}")
    asked = parser.parse_args()
    columns = ["mixer", "one, MiB", "a rank, MiB", "share", "one, s", "ranks, s", "gradients differ by"]
    title = (
        f"{asked.tokens:,} tokens x {asked.dim}, forward and backward: one process, and the largest of {asked.ranks}"
    )
    table, found = Table(title, columns, []), {}
    for name in asked.mixers:
        found[name] = row = compared(name, asked)
        above, seconds = (max(rank[n] for rank in row["ranks"]) for n in ("above_mib", "seconds"))
        memory = f"{row['one']['above_mib']:,.0f}", f"{above:,.0f}", f"{row['memory_share']:.0%}"
        times = f"{row['one']['seconds']:.1f}", f"{seconds:.1f}"
        table.rows.append([name, *memory, *times, f"{row['gradient_difference']:.1e}"])
    print(table.text())
    if asked.record:
        kept = {"machine": machine(), "tokens": asked.tokens, "dim": asked.dim, "mixers": found}
        RECORD.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
