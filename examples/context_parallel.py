"""Train a language model on sequences that are shared among processes, each of which holds a part of the tokens.

    torchrun --nproc-per-node 2 examples/context_parallel.py
    torchrun --nproc-per-node 4 examples/context_parallel.py --length 65536 --steps 3

Every process reads its own stretch of one long text. The mixers pass on the states that stand for all tokens before it,
a few kilobytes in each layer whatever the length, and gradients return the other way. The weights stay the same on all
processes, and the losses are those of one process.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tokenmix.models import LM, LMConfig
from tokenmix.parallel import context_parallel, shared_mean, sum_gradients


def text(length: int) -> Tensor:
    """Return the first bytes (length,) of the sources of Python's standard library."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= length:
            break
    return torch.frombuffer(found, dtype=torch.uint8)[:length].long()


def build() -> LM:
    """Return a small byte model, the same on every process: two layers, one with a window."""
    torch.manual_seed(0)
    mixers = ({"name": "aft_forget"}, {"name": "linear", "heads": 4})
    return LM(LMConfig(dim=64, layers=2, mixers=mixers, max_len=1 << 20, positions=None))


def train(length: int, steps: int) -> list[float]:
    """Train on ``length`` bytes a step, shared among all processes of the group; return the loss of each step."""
    model, rank, ranks = build(), dist.get_rank(), dist.get_world_size()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    start, stop = length * rank // ranks, length * (rank + 1) // ranks
    every = text(steps * length + 1)
    for step in range(steps):
        piece = every[step * length + start : step * length + stop + 1]  # each byte predicts the next one
        with context_parallel(model):
            logits = model(piece[None, :-1])
        total = F.cross_entropy(logits[0], piece[1:], reduction="sum")
        loss = shared_mean(total, stop - start)  # over the tokens of all processes
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step + 1}: {losses[-1]:.4f} nats per byte, {length} bytes on {ranks} processes", flush=True)
    return losses


def main() -> None:
    """Read the options, join the other processes, train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--length", type=int, default=4096, help="bytes of one sequence")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options.length, options.steps)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
