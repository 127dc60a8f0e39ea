"""The windows of text in the batch of a step.

They are a pure function of (seed, step), so a run resumes exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import MixerError

MASK = (1 << 64) - 1


class Sampler:
    """Sample windows of ``seq_len + 1`` bytes; each epoch visits every window once, in a new order and at a new offset.

    Nothing is stored between steps: the order is a keyed permutation, which is computed rather than shuffled.
    """

    def __init__(self, data: Tensor, *, seq_len: int, batch_size: int, seed: int = 0):
        if len(data) < seq_len + 1:
            raise MixerError(
                f"Sampler: {len(data)} bytes are too short for one sequence of seq_len={seq_len} and its next byte."
            )
        self.data, self.seq_len, self.batch_size, self.seed = data, seq_len, batch_size, seed
        whole = (len(data) - 1) // seq_len
        self.windows = max(1, whole - 1)
        self.slack = len(data) - 1 - self.windows * seq_len

    def starts(self, step: int) -> list[int]:
        """Return the first byte of each window of a step."""
        first = step * self.batch_size
        return [self._start(i) for i in range(first, first + self.batch_size)]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (B, T), int64; the targets are the bytes that follow the inputs."""
        rows = torch.stack([self.data[s : s + self.seq_len + 1] for s in self.starts(step)]).long()
        return rows[:, :-1], rows[:, 1:]

    def _start(self, index: int) -> int:
        epoch, rank = divmod(index, self.windows)
        key = mix64(self.seed * 0x9E3779B97F4A7C15 + epoch)
        offset = mix64(key ^ 0xD1B54A32D192ED03) % (min(self.slack, self.seq_len - 1) + 1)
        return offset + permute_index(rank, self.windows, key) * self.seq_len


def mix64(x: int) -> int:
    """Hash to 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def permute_index(index: int, n: int, key: int) -> int:
    """Return the image of ``index`` in a keyed permutation of 0..n-1.

    It is a four-round Feistel network, applied until the result is below n.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for r in range(4):
            left, right = right, left ^ (mix64(key ^ mix64((right << 8) | r)) & low)
        index = (left << half) | right
        if index < n:
            return index


def permuted_ranks(ranks: Tensor, n: int, key: int) -> Tensor:
    """Return ``permute_index`` of every rank of a tensor, int64 (N,), in a few operations on the whole of it."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    found = ranks.clone()
    outside = torch.arange(len(ranks))
    while len(outside):
        left, right = found[outside] >> half, found[outside] & low
        for r in range(4):
            left, right = right, left ^ (_mix64_tensor(_mix64_tensor((right << 8) | r) ^ _to_signed(key)) & low)
        found[outside] = (left << half) | right
        outside = outside[found[outside] >= n]
    return found


def _mix64_tensor(x: Tensor) -> Tensor:
    """Return ``mix64`` of every number of a tensor, as signed 64-bit numbers."""
    x = x + _to_signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _to_signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift signed 64-bit numbers to the right as if they had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _to_signed(x: int) -> int:
    """Return the signed 64-bit number with the bits of ``x``."""
    return x - (1 << 64) if x >= 1 << 63 else x
