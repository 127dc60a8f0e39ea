"""Which windows of text make up the batch of a step: a pure function of (seed, step), so a run resumes exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError

MASK = (1 << 64) - 1


class Sampler:
    """Windows of ``seq_len + 1`` bytes, each epoch visiting every window once in a new order, cut at a new offset.

    Nothing is stored between steps: the order is a keyed permutation that is computed, not shuffled.
    """

    def __init__(self, data: Tensor, *, seq_len: int, batch_size: int, seed: int = 0):
        if len(data) < seq_len + 1:
            raise MixerError(f"Sampler: {len(data)} bytes are too short for one sequence of seq_len={seq_len} and its next byte.")
        self.data, self.seq_len, self.batch_size, self.seed = data, seq_len, batch_size, seed
        whole = (len(data) - 1) // seq_len
        self.windows = max(1, whole - 1)
        self.slack = len(data) - 1 - self.windows * seq_len

    def starts(self, step: int) -> list[int]:
        """Where the windows of this step begin."""
        first = step * self.batch_size
        return [self._start(i) for i in range(first, first + self.batch_size)]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T), int64; the targets are the inputs' next bytes."""
        rows = torch.stack([self.data[s : s + self.seq_len + 1] for s in self.starts(step)]).long()
        return rows[:, :-1], rows[:, 1:]

    def _start(self, index: int) -> int:
        epoch, rank = divmod(index, self.windows)
        key = mix64(self.seed * 0x9E3779B97F4A7C15 + epoch)
        offset = mix64(key ^ 0xD1B54A32D192ED03) % (min(self.slack, self.seq_len - 1) + 1)
        return offset + permuted(rank, self.windows, key) * self.seq_len


def mix64(x: int) -> int:
    """A 64-bit hash (the finaliser of splitmix64, Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def permuted(index: int, n: int, key: int) -> int:
    """Where a keyed permutation of 0..n-1 sends ``index``: a four-round Feistel network, walked until it lands below n."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for r in range(4):
            left, right = right, left ^ (mix64(key ^ mix64((right << 8) | r)) & low)
        index = (left << half) | right
        if index < n:
            return index
