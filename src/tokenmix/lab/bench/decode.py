"""The measured cost of generating one more token after a context, and the training rate at a length."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...mixers import State, state_bytes

CHUNK = 256


@dataclass(frozen=True)
class Decoding:
    """Milliseconds for one more token after ``context`` tokens, and the bytes of state kept, for one sequence."""

    context: int
    ms_per_token: float
    state_bytes: int


@torch.no_grad()
def state_after(model: Any, context: int, *, batch_size: int = 1) -> State:
    """Compute the streaming state after ``context`` tokens, read in chunks as a prompt would be."""
    state = model.init_state(batch_size)
    tokens = (
        torch.arange(context, device=next(model.parameters()).device)
        .remainder(model.config.vocab)
        .expand(batch_size, -1)
    )
    for piece in tokens.split(CHUNK, 1):
        _, state = model.extend(piece, state)
    return state


@torch.no_grad()
def decoding(model: Any, context: int, *, tokens: int = 24, seconds: float = 2.0) -> Decoding:
    """Time single-token steps from the same state, so that the context does not grow.

    The result is the lower quartile of up to ``tokens`` steps.
    """
    was_training = model.training
    model.eval()
    state = state_after(model, context)
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    model.extend(token, state)
    times: list[float] = []
    while len(times) < 3 or (len(times) < tokens and sum(times) < seconds):
        start = _current_time(token)
        model.extend(token, state)
        times.append(_current_time(token) - start)
    model.train(was_training)
    return Decoding(context, sorted(times)[len(times) // 4] * 1e3, state_bytes(state))


def training_rate(model: nn.Module, length: int, *, batch_size: int = 1, vocab: int = 256, repeats: int = 3) -> float:
    """Measure tokens per second of forward and backward at a sequence length: the fastest of ``repeats`` after one
    warm-up.
    """
    tokens = torch.randint(vocab, (batch_size, length + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(next(model.parameters()).device)
    best = float("inf")
    for i in range(repeats + 1):
        start = _current_time(tokens)
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        best = min(best, _current_time(tokens) - start) if i else best
        model.zero_grad(set_to_none=True)
    return batch_size * length / best


def _current_time(tensor: torch.Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
