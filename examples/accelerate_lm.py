"""Train a language model of ours in a loop of Hugging Face's accelerate, on any number of processes.

    accelerate launch --num_processes 8 --mixed_precision bf16 examples/accelerate_lm.py
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/accelerate_lm.py  # on CPUs

Nothing here is particular to our layers: they are modules like any other. Each process reads its share of the rows of a
batch, and torch's DDP averages the gradients, so the losses are those of one process.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from tokenmix.models import LM, LMConfig

ROWS, LENGTH, ACCUMULATE = 8, 64, 2


def train(steps: int, accelerator: Accelerator) -> list[float]:
    """Train on the sources of Python's standard library; return the loss of each step over all processes."""
    set_seed(0)
    model = LM(LMConfig(dim=32, layers=2, max_len=LENGTH, mixers=({"name": "aft_simple"}, {"name": "hydra"})))
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, LENGTH + 1, LENGTH)
    data: Any = [*windows[: steps * ACCUMULATE * ROWS]]
    loader = DataLoader(data, batch_size=ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, total = [], 0.0
    for rows in loader:
        with accelerator.accumulate(model):  # gradients are exchanged at the last part of a step only
            logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total += accelerator.reduce(loss.detach(), "mean").item() / ACCUMULATE
        if accelerator.sync_gradients:
            losses.append(total)
            total = 0.0
            accelerator.print(f"step {len(losses)}: {losses[-1]:.6f} nats on {accelerator.num_processes} processes")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=5)
    loading = DataLoaderConfiguration(split_batches=True)  # a batch of the loader is one of all processes together
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, dataloader_config=loading)
    train(parser.parse_args().steps, accelerator)
    accelerator.end_training()
