"""Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927).

A sequence gives keys with values, then the keys again; the model must predict the value of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import MixerError

IGNORED = -100  # target where there is no query; torch's cross entropy ignores it


def recall_batch(
    batch: int, *, seq_len: int, pairs: int, vocab: int, generator: torch.Generator, power: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Draw a batch: tokens (B, T) and targets (B, T), both int64.

    A row begins with k1 v1 k2 v2 ..., ``pairs`` different keys with one value each. Every key then occurs once more in
    the rest of the row, where its value is the target. Token 0 fills the rest; keys are 1 .. (vocab - 1) // 2, and
    values are larger. Slot i of the rest is chosen with probability proportional to (i + 1)^(power - 1), so that most
    queries come soon and some late.

    Raises:
        MixerError: if the pairs do not fit into the sequence or the vocabulary.
    """
    check_recall(seq_len=seq_len, pairs=pairs, vocab=vocab)
    keys, slots = (vocab - 1) // 2, seq_len - 2 * pairs
    key = torch.rand(batch, keys, generator=generator).argsort(1)[:, :pairs] + 1
    value = torch.randint(keys + 1, vocab, (batch, pairs), generator=generator)
    tokens = torch.zeros(batch, seq_len, dtype=torch.long)
    targets = torch.full_like(tokens, IGNORED)
    tokens[:, : 2 * pairs] = torch.stack([key, value], -1).flatten(1)
    likely = (torch.arange(slots) + 1.0) ** (power - 1)
    slot = 2 * pairs + torch.multinomial(likely.expand(batch, -1), pairs, generator=generator)
    return tokens.scatter_(1, slot, key), targets.scatter_(1, slot, value)


def check_recall(*, seq_len: int, pairs: int, vocab: int, who: str = "recall_batch") -> None:
    """Refuse pairs that do not fit into the sequence or the vocabulary; ``who`` begins the message."""
    if pairs < 1:
        raise MixerError(f"{who}: pairs must be at least 1, got {pairs}.")
    if seq_len < 3 * pairs or (vocab - 1) // 2 < pairs:
        raise MixerError(
            f"{who}: {pairs} pairs need seq_len >= {3 * pairs} and vocab >= {2 * pairs + 1}, got "
            + f"seq_len={seq_len}, vocab={vocab}."
        )
