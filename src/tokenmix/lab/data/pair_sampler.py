"""Batches of pairs of like lengths, each a pure function of (seed, step), so that a run resumes exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError
from .sampler import MASK, mix64, permute_index
from .subwords import END, PAD, START

IGNORED = -100


class PairBatch(NamedTuple):
    """What an encoder-decoder reads; rows are padded on the right with ``PAD``.

    Attributes:
        source: (B, S) tokens, each row ended by ``END``.
        target: (B, T) tokens, each row begun by ``START``.
        source_mask: (B, S) bool, False at padding.
        target_mask: (B, T) bool, False at padding.
    """

    source: Tensor
    target: Tensor
    source_mask: Tensor
    target_mask: Tensor


def pair_batch(sources: list[list[int]], targets: list[list[int]]) -> tuple[PairBatch, Tensor]:
    """Return what a model reads of pairs of tokens, and the tokens (B, T) it should say; ``IGNORED`` at padding."""
    source, source_mask = pad_rows([[*tokens, END] for tokens in sources])
    target, target_mask = pad_rows([[START, *tokens] for tokens in targets])
    said, _ = pad_rows([[*tokens, END] for tokens in targets])
    return PairBatch(source, target, source_mask, target_mask), said.masked_fill(~target_mask, IGNORED)


def pad_rows(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return rows of tokens as one tensor (B, T), int64, padded on the right, and a mask that is False at padding."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = max((len(row) for row in rows), default=0)
    tokens = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows], dtype=torch.long)
    return tokens.reshape(len(rows), longest), torch.arange(longest) < lengths[:, None]


class LengthBuckets:
    """Which rows are in the batch of a step: every epoch visits each row once, in batches of rows of like lengths.

    Rows are ordered by their lengths, those of equal lengths in a new order in each epoch, and cut into batches, which
    come in a new order too. Nothing is stored between steps.

    Args:
        lengths: (rows, parts) tokens of each part of a row, such as source and target; the last counts first.
        batch_size: most rows in a batch.
        batch_tokens: most tokens in a batch, padding and all parts included; None: no limit.
        seed: seed of all orders.

    Raises:
        MixerError: if a single row has more tokens than ``batch_tokens``.
    """

    def __init__(self, lengths: Tensor, *, batch_size: int, batch_tokens: int | None = None, seed: int = 0):
        self.lengths, self.seed = lengths, seed
        self.order: tuple[int, Tensor] | None = None  # of the last epoch that was asked for
        rows = lengths[self._epoch_order(0)].tolist()
        self.bounds, longest = [0], [0] * lengths.shape[1]
        for i, row in enumerate(rows):
            wider = [max(a, b) for a, b in zip(longest, row, strict=True)]
            count = i + 1 - self.bounds[-1]
            if batch_tokens is not None and sum(row) > batch_tokens:
                raise MixerError(
                    f"data.batch_tokens={batch_tokens} is less than the {sum(row)} tokens of one row; give more, or a "
                    + "lower data.max_tokens."
                )
            if count > batch_size or (batch_tokens is not None and count * sum(wider) > batch_tokens):
                self.bounds.append(i)
                wider = row
            longest = wider
        self.bounds.append(len(rows))

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.bounds) - 1

    def rows(self, step: int) -> list[int]:
        """Return the rows in the batch of a step."""
        epoch, rank = divmod(step, len(self))
        batch = permute_index(rank, len(self), self._key(epoch))
        return self._epoch_order(epoch)[self.bounds[batch] : self.bounds[batch + 1]].tolist()

    def _key(self, epoch: int) -> int:
        return mix64(self.seed * 0x9E3779B97F4A7C15 + epoch)

    def _epoch_order(self, epoch: int) -> Tensor:
        """Return all rows by length, those of equal lengths in the epoch's order."""
        if self.order is None or self.order[0] != epoch:
            generator = torch.Generator().manual_seed(mix64(self._key(epoch)) & MASK)
            order = torch.randperm(len(self.lengths), generator=generator)
            for part in self.lengths.unbind(1):
                order = order[part[order].argsort(stable=True)]
            self.order = epoch, order
        return self.order[1]
