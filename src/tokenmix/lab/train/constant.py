"""The predictor that reads nothing, the floor of every score: what is not above it has learned nothing to compare."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..data.pair_sampler import IGNORED

BATCHES = 50
"""Training batches whose targets are counted."""


class Constant(nn.Module):
    """Answer the same whatever it reads.

    Args:
        logits: (V,) what it says of every target.
        places: dimensions of what it reads, after the batch, that have a target each: 0 for a class of the whole, 1 for
            tokens or points, 2 for the pixels of images (B, C, H, W).
    """

    max_len = None

    def __init__(self, logits: Tensor, places: int):
        super().__init__()
        self.logits, self.places = nn.Parameter(logits, requires_grad=False), places

    def forward(self, first: Tensor | None = None, **given: Tensor) -> Tensor:
        """Return the logits at every place: (B, V), (B, T, V) or (B, V, H, W)."""
        read = next(iter(given.values())) if first is None else first
        if self.places == 2:
            return self.logits[:, None, None].expand(len(read), -1, *read.shape[-2:])
        read = given.get("chosen", given.get("target", read))
        return self.logits.expand(*read.shape[: 1 + self.places], -1)

    def bits(self, tokens: Tensor) -> Tensor:
        """Return the mean bits of the sub-pixels of each image, (B, N) -> (B,)."""
        return -self.logits.double().log_softmax(0)[tokens.long()].mean(1) / math.log(2)


class Zeros(nn.Module):
    """Predict 0 of everything.

    Args:
        shape: of the predictions, after the batch; None: that of what is read.
    """

    def __init__(self, shape: tuple[int, ...] | None = None):
        super().__init__()
        self.shape, self.device = shape, nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, **given: Tensor) -> Tensor:
        """Return zeros for what is read first."""
        read = next(iter(given.values()))
        return torch.zeros_like(read) if self.shape is None else read.new_zeros(len(read), *self.shape)


def shares(batch: Callable[[int], tuple[object, Tensor]], outputs: int) -> Tensor:
    """Return the logarithm of each output's share of the targets of the first training batches, (outputs,).

    One that was never seen counts as half of one target.
    """
    counts = torch.full((outputs,), 0.5, dtype=torch.float64)
    for step in range(BATCHES):
        targets = batch(step)[1]
        counts += targets[targets != IGNORED].flatten().bincount(minlength=outputs)
    return (counts / counts.sum()).log().float()
