"""Sequences that are drawn while a model trains on them, each batch a pure function of (seed, step)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MixerError
from ..system.config import nearest
from .copying import check_copy, copy_batch
from .recall import check_recall, recall_batch
from .sampler import MASK, mix64

SYNTHETIC_TASKS = ("recall", "copy")
HELD_OUT = ("valid", "test")


@dataclass(frozen=True)
class Synthetic:
    """A synthetic task and the shape of its sequences.

    Args:
        task: "recall" (see ``recall_batch``) or "copy" (see ``copy_batch``).
        seq_len: tokens per sequence.
        vocab: number of tokens in the vocabulary.
        pairs: pairs of key and value in a sequence of "recall"; "copy" has none.

    Raises:
        MixerError: for an unknown task, or a shape that does not fit it.
    """

    task: str
    seq_len: int
    vocab: int
    pairs: int = 8

    def __post_init__(self) -> None:
        if self.task not in SYNTHETIC_TASKS:
            raise MixerError(f"there is no synthetic task {self.task!r}; {nearest(self.task, SYNTHETIC_TASKS)}.")
        if self.task == "recall":
            check_recall(seq_len=self.seq_len, pairs=self.pairs, vocab=self.vocab, who="recall")
        else:
            check_copy(seq_len=self.seq_len, vocab=self.vocab, who="copy")

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw tokens and targets (B, T), both int64; targets of positions that are not scored are ``IGNORED``."""
        if self.task == "recall":
            return recall_batch(batch, seq_len=self.seq_len, pairs=self.pairs, vocab=self.vocab, generator=generator)
        return copy_batch(batch, seq_len=self.seq_len, vocab=self.vocab, generator=generator)

    def batch(self, batch: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Draw the training batch of a step: tokens and targets (B, T), both int64."""
        return self.draw(batch, _generator(mix64(seed * 0x9E3779B97F4A7C15 + step) | 1))

    def held_out(self, split: str, sequences: int) -> tuple[Tensor, Tensor]:
        """Draw the split "valid" or "test": tokens and targets (B, T), both int64, the same for all seeds of training.

        None of it comes from a generator that training uses: seeds of generators are odd there and even here.

        Raises:
            MixerError: for an unknown split.
        """
        if split not in HELD_OUT:
            raise MixerError(f"{self.task} has no split {split!r}; choose one of {', '.join(('train', *HELD_OUT))}.")
        return self.draw(sequences, _generator(mix64(HELD_OUT.index(split)) & ~1))

    def sha256(self, sequences: int) -> str:
        """Return the sha256 of the validation split, which is another where torch draws other numbers."""
        tokens, targets = self.held_out("valid", sequences)
        return hashlib.sha256(tokens.numpy().tobytes() + targets.numpy().tobytes()).hexdigest()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed & MASK)
