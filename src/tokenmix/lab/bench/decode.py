"""The measured cost of generating one more token after a context, and the training rate at a length."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...mixers import State, state_bytes
from ...models import LM
from ...models.decoder import serves

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
    tokens = torch.arange(context, device=device_of(model)).remainder(model.config.vocab).expand(batch_size, -1)
    for start in range(0, context, CHUNK):
        _, state = model.extend(tokens[:, start : start + CHUNK], state)
    return state


@torch.no_grad()
def decoding(model: Any, context: int, *, tokens: int = 24, seconds: float = 2.0) -> Decoding:
    """Time the token after ``context`` others, as ``generate`` computes it: by ``model.decoder()`` where one serves.

    The context does not grow. The result is the lower quartile of up to ``tokens`` steps.
    """
    was_training = model.training
    model.eval()
    planned = isinstance(model, LM) and serves(model)
    extend = model.decoder(max_len=context + 1).extend if planned else model.extend
    before, token = state_after(model, context - 1), torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    _, state = extend(token, before)
    held = state_bytes(state)
    extend(token, state)
    times: list[float] = []
    while len(times) < 3 or (len(times) < tokens and sum(times) < seconds):
        _, state = extend(token, before)  # copied into the memory of a decoder, or joined to others: not timed
        start = _current_time(token)
        extend(token, state)
        times.append(_current_time(token) - start)
    model.train(was_training)
    return Decoding(context, sorted(times)[len(times) // 4] * 1e3, held)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU where it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def training_rate(model: nn.Module, length: int, *, batch_size: int = 1, vocab: int = 256, repeats: int = 3) -> float:
    """Measure tokens per second of forward and backward at a sequence length: the fastest of ``repeats`` after one
    warm-up.
    """
    tokens = torch.randint(vocab, (batch_size, length + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device_of(model))
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
