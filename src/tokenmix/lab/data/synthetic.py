"""Sequences that are drawn while a model trains on them, each batch a pure function of (seed, step)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ...system.config import nearest
from .characters import CHARACTER_TASKS, CHARACTERS, FILL, LETTERS, Options, rows_of
from .recall import IGNORED, check_recall, recall_batch
from .sampler import MASK, mix64, permute_index

SYNTHETIC_TASKS = ("recall", *CHARACTER_TASKS)
HELD_OUT = ("valid", "test")


@dataclass(frozen=True)
class Synthetic:
    """A synthetic task and the shape of its sequences.

    Args:
        task: "recall" (see ``recall_batch``) or one of ``CHARACTER_TASKS``.
        seq_len: tokens per sequence of "recall"; of the other tasks, whose rows end where the longest one of training
            would, the most that there may be.
        vocab: number of tokens in the vocabulary.
        pairs: pairs of key and value in a sequence of "recall".
        shortest: smallest size of the other tasks, for each of their sizes: digits, symbols, numbers.
        longest: largest size. Every combination of sizes from the shortest to the longest is drawn equally often.
        pad: "addition" and "multiplication": zeros in front of operands and results, so that both operands have one
            length and all results of two lengths too.
        symbols: "copy", "reverse" and "selective_copy": number of different symbols.
        examples: number of sequences that training goes through again and again, each time in a new order; they are
            kept in memory. None: every batch is drawn anew.

    Raises:
        MixerError: for an unknown task, or a shape that does not fit it.
    """

    task: str
    seq_len: int
    vocab: int
    pairs: int = 8
    shortest: int = 1
    longest: int = 8
    pad: bool = False
    symbols: int = 10
    examples: int | None = None

    def __post_init__(self) -> None:
        if self.task not in SYNTHETIC_TASKS:
            raise MixerError(f"there is no synthetic task {self.task!r}; {nearest(self.task, SYNTHETIC_TASKS)}.")
        if self.examples is not None and self.examples < 1:
            raise MixerError(
                f"{self.task}: examples is at least 1, or None for sequences that are drawn anew; got {self.examples}."
            )
        if self.task == "recall":
            check_recall(seq_len=self.seq_len, pairs=self.pairs, vocab=self.vocab, who="recall")
            return
        if not 1 <= self.shortest <= self.longest or self.symbols < 2:
            raise MixerError(
                f"{self.task}: needs 1 <= shortest <= longest and symbols >= 2, got {self.shortest}, {self.longest} "
                + f"and {self.symbols}."
            )
        self.check_sizes((self.longest,) * len(self.sizes))
        tokens = max(len(CHARACTERS), LETTERS + self.symbols - 10)
        if self.vocab < tokens:
            raise MixerError(f"{self.task}: its characters need vocab >= {tokens}, got {self.vocab}.")
        needed = self.longest_row()
        if self.seq_len < needed:
            raise MixerError(
                f"{self.task}: sizes of up to {self.longest} need seq_len >= {needed}, got {self.seq_len}."
            )

    @property
    def sizes(self) -> tuple[str, ...]:
        """Return the names of the task's sizes, of which "recall" has none."""
        return () if self.task == "recall" else CHARACTER_TASKS[self.task].sizes

    def tokens(self, sizes: tuple[int, ...]) -> int:
        """Return how many tokens a model reads, at most, in a row of such sizes."""
        return CHARACTER_TASKS[self.task].length(sizes, self._options()) - 1

    def longest_row(self) -> int:
        """Return how many tokens a model reads, at most, in a row of training."""
        return self.seq_len if self.task == "recall" else self.tokens((self.longest,) * len(self.sizes))

    def check_sizes(self, sizes: tuple[int, ...]) -> None:
        """Refuse sizes of which the task has no rows."""
        names = self.sizes
        if not names:
            raise MixerError(f"{self.task} has no sizes: its shape is that of training (seq_len and pairs).")
        if len(sizes) != len(names) or not all(isinstance(n, int) and n >= 1 for n in sizes):
            raise MixerError(f"{self.task}: needs sizes of at least 1 ({', '.join(names)}), got {sizes}.")
        for name, n, limit in zip(names, sizes, CHARACTER_TASKS[self.task].limits, strict=False):
            if limit is not None and n > limit:
                raise MixerError(f"{self.task}: at most {limit} {name}, got {n}.")

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw tokens and targets (B, T), both int64; targets of positions that are not scored are ``IGNORED``."""
        if self.task == "recall":
            return recall_batch(batch, seq_len=self.seq_len, pairs=self.pairs, vocab=self.vocab, generator=generator)
        shape = batch, len(self.sizes)
        return self._rows(torch.randint(self.shortest, self.longest + 1, shape, generator=generator), generator)

    def batch(self, batch: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Draw the training batch of a step: tokens and targets (B, T), both int64."""
        if self.examples is None:
            return self.draw(batch, _generator(mix64(seed * 0x9E3779B97F4A7C15 + step) | 1))
        tokens, targets = _examples(replace(self, examples=None), self.examples, seed)
        rows = []
        for index in range(step * batch, (step + 1) * batch):
            epoch, rank = divmod(index, self.examples)
            rows.append(permute_index(rank, self.examples, mix64(mix64(seed) + epoch)))
        return tokens[rows], targets[rows]

    def held_out(self, split: str, sequences: int) -> tuple[Tensor, Tensor]:
        """Draw the split "valid" or "test": tokens and targets (B, T), both int64, the same for all seeds of training.

        None of it comes from a generator that training uses: seeds of generators are odd there and even here.

        Raises:
            MixerError: for an unknown split.
        """
        return self.draw(sequences, _generator(mix64(self._split(split)) & ~1))

    def of_sizes(self, sizes: tuple[int, ...], split: str, sequences: int) -> tuple[Tensor, Tensor]:
        """Draw held-out rows of given sizes, which training need not have seen: tokens and targets (B, T), both int64.

        They end where the longest of them ends, and are the same for all seeds of training.

        Raises:
            MixerError: for an unknown split, and for sizes of which the task has no rows.
        """
        self.check_sizes(sizes)
        key = mix64(self._split(split) + len(HELD_OUT))
        for n in sizes:
            key = mix64(key ^ n)
        return self._rows(torch.tensor([sizes]).expand(sequences, -1), _generator(key & ~1), self.tokens(sizes))

    def sha256(self, sequences: int) -> str:
        """Return the sha256 of the validation split, which is another where torch draws other numbers."""
        tokens, targets = self.held_out("valid", sequences)
        return hashlib.sha256(tokens.numpy().tobytes() + targets.numpy().tobytes()).hexdigest()

    def _rows(self, sizes: Tensor, generator: torch.Generator, seq_len: int | None = None) -> tuple[Tensor, Tensor]:
        rows, answer = rows_of(CHARACTER_TASKS[self.task], sizes, self._options(), generator)
        length = seq_len or self.longest_row()
        rows = F.pad(rows, (0, length + 1 - rows.shape[1]), value=FILL)
        answer = F.pad(answer, (0, rows.shape[1] - answer.shape[1]))
        return rows[:, :-1], rows[:, 1:].masked_fill(~answer[:, 1:], IGNORED)

    def _options(self) -> Options:
        return Options(pad=self.pad, symbols=self.symbols)

    def _split(self, name: str) -> int:
        if name not in HELD_OUT:
            raise MixerError(f"{self.task} has no split {name!r}; choose one of {', '.join(('train', *HELD_OUT))}.")
        return HELD_OUT.index(name)


@lru_cache(maxsize=1)
def _examples(drawn: Synthetic, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the sequences that training with this seed goes through: tokens and targets (count, T), both int64."""
    return drawn.batch(count, seed=seed, step=0)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed & MASK)
