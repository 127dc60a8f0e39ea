"""Bits per byte over overlapping windows: every byte is scored once, with enough context."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...models import evaluation_mode
from ...system.machine import autocast
from ...types import Options
from .task import groups_of, record_seconds


@dataclass(frozen=True)
class EvalResult:
    """The mean bits per byte over ``bytes`` bytes, in windows of ``seq_len`` bytes moved by ``stride``.

    ``by_context``, if it was asked for, holds (least, most, bits per byte) for the bytes that had between ``least`` and
    ``most`` bytes of context; from one to the next the context doubles.
    """

    bits_per_byte: float
    bytes: int
    seq_len: int
    stride: int
    seconds: float = 0.0
    by_context: tuple[tuple[int, int, float], ...] | None = None
    scaling: Options | None = None
    """The rule by which rotary positions were scaled; None: as in training."""
    resized: int | None = None
    """The length to which everything that has one was stretched; None: as in training."""

    def text(self) -> str:
        whole = (
            f"{self.bits_per_byte:.4f} bits/byte over {self.bytes:,} bytes, windows of {self.seq_len} moved by "
            + f"{self.stride}"
            + (f", rotary positions scaled by {json.dumps(self.scaling)}" if self.scaling else "")
            + (f", the model stretched to {self.resized} tokens" if self.resized else "")
        )
        parts = [f"\n{least:>8} to {most:<6} {bits:.4f}" for least, most, bits in self.by_context or ()]
        return whole + ("\n   bytes of context  bits/byte" + "".join(parts) if parts else "")


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


@record_seconds
def evaluate(
    model: nn.Module,
    data: Tensor,
    *,
    seq_len: int,
    stride: int | None = None,
    batch_size: int = 16,
    max_bytes: int | None = None,
    precision: str = "fp32",
    by_context: bool = False,
) -> EvalResult:
    """Score every byte of ``data`` (uint8) once.

    Each has at least ``seq_len - stride`` bytes of context, except near the start. The first byte has no context and is
    charged as a uniform guess over the vocabulary.

    Args:
        stride: bytes that windows advance by; default half of seq_len, or all of it with ``by_context``. 1 is the most
            accurate and the slowest.
        max_bytes: score only the first ``max_bytes`` bytes; None: all.
        by_context: also return the score of the bytes with 1, 2 to 3, 4 to 7 ... bytes of context.
    """
    data = data if max_bytes is None else data[:max_bytes]
    stride = stride if stride is not None else max(seq_len if by_context else seq_len // 2, 1)
    if not 1 <= stride <= seq_len:
        raise MixerError(f"evaluate: stride must be in 1..seq_len={seq_len}, got {stride}.")
    if len(data) < 2:
        raise MixerError(f"evaluate: needs at least 2 bytes, got {len(data)}.")
    device = next(model.parameters()).device
    length = min(seq_len, len(data) - 1)
    bits, count = torch.zeros(2, length, dtype=torch.float64, device=device)
    with evaluation_mode(model):
        for batch in groups_of(windows(len(data), seq_len, stride), batch_size):
            nats, wanted = _score(model, data, batch, device, precision)
            bits += torch.where(wanted, nats, 0.0).double().sum(0) / math.log(2)
            count += wanted.sum(0)
    vocab = getattr(getattr(model, "config", None), "vocab", 256)
    total = bits.sum().item() + math.log2(vocab)
    parts = _by_context(bits.tolist(), count.tolist()) if by_context else None
    return EvalResult(total / len(data), len(data), length, stride, by_context=parts)


def _by_context(bits: list[float], count: list[float]) -> tuple[tuple[int, int, float], ...]:
    """Return (least, most, mean) of the numbers of bytes of context that were scored, which start at 1."""
    found, least = [], 1
    while least <= len(bits):
        at = slice(least - 1, min(2 * least - 1, len(bits)))
        if sum(count[at]):
            found.append((least, min(2 * least - 1, len(bits)), sum(bits[at]) / sum(count[at])))
        least *= 2
    return tuple(found)


def _score(
    model: nn.Module, data: Tensor, batch: list[tuple[int, int, int]], device: torch.device, precision: str
) -> tuple[Tensor, Tensor]:
    """Return the loss in nats of every byte of some windows (rows, T), and which of them count."""
    rows = torch.stack([data[start : start + length + 1] for start, length, _ in batch]).to(device).long()
    first = torch.tensor([first for _, _, first in batch], device=device)
    with autocast(device, precision):
        logits = model(rows[:, :-1])
    nats = F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")
    return nats, torch.arange(nats.shape[1], device=device) >= first[:, None]
