"""Measure the training speed of several models in one process.

The models take turns, so that any other load on the machine affects all of them alike.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from tokenmix.models import LM, LMConfig


def train_rates(configs: dict[str, LMConfig], *, batch: int, seq_len: int, rounds: int = 7) -> dict[str, float]:
    """Measure tokens per second of one training step of each model, with one thread.

    The figure is the lower quartile of the times of ``rounds`` turns.
    """
    torch.set_num_threads(1)
    runs = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        model = LM(config).train()
        runs[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.randint(
        0, next(iter(configs.values())).vocab, (batch, seq_len + 1), generator=torch.Generator().manual_seed(0)
    )
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, (model, optimizer) in runs.items():
            start = time.perf_counter()
            logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - start)
    return {name: round(batch * seq_len / sorted(each)[len(each) // 4], 1) for name, each in times.items()}
