"""Bits per byte over overlapping windows: every byte is scored once, with enough context."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..models import evaluating
from ..system.machine import autocast


@dataclass(frozen=True)
class EvalResult:
    """The mean bits per byte over ``bytes`` bytes, in windows of ``seq_len`` bytes moved by ``stride``."""

    bits_per_byte: float
    bytes: int
    seq_len: int
    stride: int
    seconds: float

    def text(self) -> str:
        """Return the result as one readable line."""
        return (
            f"{self.bits_per_byte:.4f} bits/byte over {self.bytes:,} bytes, windows of {self.seq_len} moved by "
            + f"{self.stride}"
        )


def windows(size: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, length, first scored target) of each window over ``size`` bytes.

    A window's targets are the bytes start+1 .. start+length.
    Each window scores the bytes that those before it did not reach; the last one is moved back so that it is as long as
    the others.
    """
    length = min(seq_len, size - 1)
    scored, start = 1, 0
    while scored < size:
        start = min(start, size - 1 - length)
        yield start, length, scored - start - 1
        scored = start + length + 1
        start += stride


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Tensor,
    *,
    seq_len: int,
    stride: int | None = None,
    batch_size: int = 16,
    max_bytes: int | None = None,
    precision: str = "fp32",
) -> EvalResult:
    """Score every byte of ``data`` (uint8) once.

    Each has at least ``seq_len - stride`` bytes of context, except near the start. The first byte has no context and is
    charged as a uniform guess over the vocabulary.

    Args:
        stride: bytes that windows advance by; default half of seq_len. 1 is the most accurate and the slowest.
        max_bytes: score only the first ``max_bytes`` bytes; None: all.
    """
    data = data if max_bytes is None else data[:max_bytes]
    stride = stride if stride is not None else max(seq_len // 2, 1)
    if not 1 <= stride <= seq_len:
        raise MixerError(f"evaluate: stride must be in 1..seq_len={seq_len}, got {stride}.")
    if len(data) < 2:
        raise MixerError(f"evaluate: needs at least 2 bytes, got {len(data)}.")
    began = time.perf_counter()
    device = next(model.parameters()).device
    bits = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model):
        for batch in _batched(windows(len(data), seq_len, stride), batch_size):
            bits += _score(model, data, batch, device, precision)
    vocab = getattr(getattr(model, "config", None), "vocab", 256)
    total = bits.item() / math.log(2) + math.log2(vocab)
    return EvalResult(total / len(data), len(data), min(seq_len, len(data) - 1), stride, time.perf_counter() - began)


def _score(
    model: nn.Module, data: Tensor, batch: list[tuple[int, int, int]], device: torch.device, precision: str
) -> Tensor:
    rows = torch.stack([data[start : start + length + 1] for start, length, _ in batch]).to(device).long()
    first = torch.tensor([first for _, _, first in batch], device=device)
    with autocast(device, precision):
        logits = model(rows[:, :-1])
    nats = F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")
    wanted = torch.arange(nats.shape[1], device=device) >= first[:, None]
    return torch.where(wanted, nats, 0.0).double().sum()


def _batched(items: Iterator[tuple[int, int, int]], n: int) -> Iterator[list[tuple[int, int, int]]]:
    batch: list[tuple[int, int, int]] = []
    for item in items:
        batch.append(item)
        if len(batch) == n:
            yield batch
            batch = []
    if batch:
        yield batch
