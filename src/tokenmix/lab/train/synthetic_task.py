"""Synthetic sequences, from recall to arithmetic, scored by the share of right answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...models import LM
from ...types import Options, Record
from ..data.characters import CHARACTER_TASKS, CHARACTERS, text_of
from ..data.recall import IGNORED
from ..data.synthetic import Synthetic
from .config import RunConfig
from .registry import TaskData
from .task import Evaluate, Task, record_seconds
from .text_task import check_beyond, check_length, streaming_cost


@dataclass(frozen=True)
class Cell:
    """The score of the rows of one combination of sizes; the fields are those of ``SyntheticScore``."""

    sizes: tuple[int, ...]
    exact: float
    accuracy: float


@dataclass(frozen=True)
class SyntheticScore:
    """The accuracy of a language model on the ``targets`` scored positions of some sequences.

    Attributes:
        accuracy: fraction of the targets that are the model's first guess.
        exact: fraction of the sequences whose targets are all the first guess, so that greedy generation writes them.
        cross_entropy: mean cross-entropy of the targets in nats.
        seq_len: tokens of the longest sequences.
        names: names of the sizes in ``grid``.
        grid: the score for each combination of sizes, if sizes were given.
        passes: passes through the blocks of a looped model, where it is not that of training.
    """

    accuracy: float
    exact: float
    cross_entropy: float
    targets: int
    sequences: int
    seq_len: int
    seconds: float = 0.0
    names: tuple[str, ...] = ()
    grid: tuple[Cell, ...] | None = None
    passes: int | None = None

    def text(self) -> str:
        whole = (
            f"{100 * self.accuracy:.2f} % right, {100 * self.exact:.2f} % of {self.sequences:,} sequences throughout, "
            + f"cross-entropy {self.cross_entropy:.4f} over {self.targets:,} targets, up to {self.seq_len} tokens"
        )
        return whole if self.grid is None else f"{whole}\n{grid_text(self.names, self.grid)}"


def grid_text(names: tuple[str, ...], grid: tuple[Cell, ...]) -> str:
    """Write the shares of exact answers, in %, by size: one line for one size, a table for two."""
    if len(names) == 1:
        lines = [f"{cell.sizes[0]:>6}  {100 * cell.exact:6.1f} %" for cell in grid]
        return "\n".join([f"{names[0]}, and sequences right throughout", *lines])
    rows, columns = (sorted({cell.sizes[i] for cell in grid}) for i in (0, 1))
    found = {cell.sizes: cell.exact for cell in grid}
    head = " " * 8 + "".join(f"{c:>5}" for c in columns)
    body = [f"{r:>6}  " + "".join(f"{100 * found[r, c]:5.0f}" for c in columns) for r in rows]
    return "\n".join([f"% of sequences right throughout; down: {names[0]}, across: {names[1]}", head, *body])


class _Answers(NamedTuple):
    """Right targets, targets, sequences right throughout, sequences, and the nats of all targets."""

    right: int
    targets: int
    exact: int
    sequences: int
    nats: float


@contextmanager
def _set_passes(model: Any, passes: int | None) -> Iterator[None]:
    """Set the number of passes of a looped model inside the block; None leaves it as it is."""
    if passes is None:
        yield
        return
    before, model.loop.times = model.loop.times, passes
    try:
        yield
    finally:
        model.loop.times = before


@dataclass(frozen=True)
class SyntheticDataConfig(TaskData):
    """Sequences for a language model that are drawn while it trains, and two sets that are held out.

    Args:
        task: "recall" (multi-query associative recall, see ``data.recall_batch``, the default), or one of
            ``data.CHARACTER_TASKS``: "addition", "multiplication", "sort", "copy", "reverse", "parity",
            "selective_copy", "passkey".
        seq_len: tokens per sequence of "recall", and the most of the other tasks, from 1 to the model's ``max_len``.
        pairs: pairs of key and value in a sequence of "recall", at least 1.
        shortest: smallest size of the other tasks (digits, symbols, numbers), at least 1.
        longest: largest size in training; ``tokenmix eval --lengths`` goes beyond.
        pad: "addition" and "multiplication": whether numbers are padded with zeros to one length.
        symbols: "copy", "reverse" and "selective_copy": number of different symbols, at least 2.
        examples: number of sequences that training goes through again and again, at least 1 and kept in memory; None:
            every batch is drawn anew.
        vocab: number of tokens in the vocabulary, at most the model's; None: the model's.
        held_out: sequences of the validation split, and of the test split, at least 1.
    """

    task: str = "recall"
    seq_len: int = 64
    pairs: int = 8
    shortest: int = 1
    longest: int = 8
    pad: bool = False
    symbols: int = 10
    examples: int | None = None
    vocab: int | None = None
    held_out: int = 512
    kind: ClassVar[str] = "synthetic"

    def sequences(self, vocab: int) -> Synthetic:
        """Return the sequences for a model with this vocabulary.

        Raises:
            MixerError: for an unknown task, or sizes that do not fit it.
        """
        try:
            return Synthetic(
                self.task,
                seq_len=self.seq_len,
                vocab=vocab if self.vocab is None else self.vocab,
                pairs=self.pairs,
                shortest=self.shortest,
                longest=self.longest,
                pad=self.pad,
                symbols=self.symbols,
                examples=self.examples,
            )
        except MixerError as why:
            raise MixerError(f"config: data: {why}") from None


class SyntheticTask(Task):
    """Train a language model on sequences that are drawn as it goes on."""

    config = SyntheticDataConfig
    models = ("lm",)
    writes, temperature, tokens = "write", 0.0, "characters"
    scored = (
        *("data.task", "data.pairs", "data.vocab", "data.held_out", "data.shortest", "data.longest", "data.pad"),
        "data.symbols",
    )
    reads_with: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {
        "data.pairs": ("data.task", ("recall",)),
        "data.shortest": ("data.task", tuple(CHARACTER_TASKS)),
        "data.longest": ("data.task", tuple(CHARACTER_TASKS)),
        "data.symbols": ("data.task", ("copy", "reverse", "selective_copy")),
    }
    metric = "accuracy"
    higher = True
    options = ("lengths", "samples", "passes")

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        self.sequences = self.data.sequences(self.model.vocab)

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse sequences that a model cannot read or that cannot be drawn."""
        check_length(config)
        data, model = cast(Any, config.data), cast(Any, config.model)
        if data.held_out < 1:
            raise MixerError(f"config: data.held_out must be positive, got {data.held_out}.")
        if data.vocab is not None and data.vocab > model.vocab:
            raise MixerError(f"config: data.vocab must be at most model.vocab={model.vocab}, got {data.vocab}.")
        data.sequences(model.vocab)

    @classmethod
    def fields_of(cls, data: object, given: str) -> Options:
        """Return the field of the name of the task."""
        return {"data.task": given}

    def facts(self) -> Record:
        data, drawn = self.data, self.sequences
        shape = {"seq_len": drawn.longest_row(), "vocab": drawn.vocab}
        return {
            "synthetic": {"name": drawn.task, **shape, "held_out": data.held_out, "sha256": drawn.sha256(data.held_out)}
        }

    def check_same(self, env: Record) -> None:
        then, now = env.get("synthetic"), self.facts()["synthetic"]
        if then and then != now:
            raise MixerError(
                f"the sequences of {now['name']} are not those that this run was trained on: they were {then}, now "
                + f"{now}; use the torch that drew them, or start a new run."
            )

    def units(self) -> int:
        return self.train.batch_size * self.sequences.longest_row()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.sequences.batch(self.train.batch_size, seed=self.train.seed, step=step)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    @record_seconds
    def evaluate(
        self,
        model: Any,
        split: str,
        /,
        *,
        lengths: tuple[int, ...] | None = None,
        samples: int | None = None,
        passes: int | None = None,
    ) -> SyntheticScore:
        """Score the model on all sequences of a split; those of "train" are the first that training has drawn.

        Args:
            lengths: score sequences of these sizes instead, of every pair of them where the task has two.
            samples: sequences for each combination of sizes; None: 100.
            passes: passes through the blocks of a looped model; None: as in training.

        Raises:
            MixerError: for an unknown split, sizes the task or the model does not have, and ``passes`` of a model
                without a loop.
        """
        if passes is not None and getattr(model, "loop", None) is None:
            raise MixerError("eval: passes is for a looped model (model.loop), and this one has no loop.")
        if lengths is None and samples is not None:
            raise MixerError("eval: samples is the number of sequences for each of lengths, which was not given.")
        parts = self._by_size(model, split, lengths, samples or 100) if lengths else {(): self.split(split)}
        with _set_passes(model, passes):
            found = {sizes: self._answers(model, *rows) for sizes, rows in parts.items()}
        answers = list(found.values())
        targets, sequences = sum(a.targets for a in answers), sum(a.sequences for a in answers)
        return SyntheticScore(
            sum(a.right for a in answers) / targets,
            sum(a.exact for a in answers) / sequences,
            sum(a.nats for a in answers) / targets,
            targets,
            sequences,
            max(tokens.shape[1] for tokens, _ in parts.values()),
            names=self.sequences.sizes if lengths else (),
            grid=tuple(Cell(n, a.exact / a.sequences, a.right / a.targets) for n, a in found.items())
            if lengths
            else None,
            passes=passes,
        )

    def _by_size(
        self, model: Any, split: str, lengths: tuple[int, ...], samples: int
    ) -> dict[tuple[int, ...], tuple[Tensor, Tensor]]:
        """Draw the sequences of every combination of sizes, and refuse those that are too long for the model."""
        if self.sequences.sizes and min(lengths) < 1:
            raise MixerError(
                f"eval: the lengths of {self.data.task} ({' and '.join(self.sequences.sizes)}) are at least 1, got "
                + f"{min(lengths)}; it was trained on {self.data.shortest} to {self.data.longest}."
            )
        combinations = list(product(lengths, repeat=max(len(self.sequences.sizes), 1)))
        for sizes in combinations:
            self.sequences.check_sizes(sizes)
            if model.max_len is not None and self.sequences.tokens(sizes) > model.max_len:
                raise MixerError(
                    f"eval: {' x '.join(map(str, sizes))} {self.data.task} has up to {self.sequences.tokens(sizes)} "
                    + f"tokens, and the model's longest sequence is {model.max_len}; give shorter lengths."
                )
        return {sizes: self.sequences.of_sizes(sizes, split, samples) for sizes in combinations}

    def _answers(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> _Answers:
        right, scored, exact, nats = 0, 0, 0, 0.0
        batches = zip(tokens.split(self.train.eval_batch), targets.split(self.train.eval_batch), strict=True)
        for said, wanted in self.answers(model, batches):
            logits, y = said.float(), wanted.to(said.device)
            asked, hit = y != IGNORED, logits.argmax(-1) == y
            right, scored = right + int((hit & asked).sum()), scored + int(asked.sum())
            exact += int((hit | ~asked).all(1).sum())
            nats += float(F.cross_entropy(logits[asked].double(), y[asked], reduction="sum"))
        return _Answers(right, scored, exact, len(tokens), nats)

    def split(self, name: str) -> tuple[Tensor, Tensor]:
        """Return tokens and targets (B, T) of a split, both int64."""
        count = self.data.held_out
        if name != "train":
            return self.sequences.held_out(name, count)
        drawn = [self.batch(step) for step in range(-(-count // self.train.batch_size))]
        tokens, targets = (torch.cat(parts)[:count] for parts in zip(*drawn, strict=True))
        return tokens, targets

    @classmethod
    def continue_text(
        cls, config: RunConfig, run: Path, model: LM, prompt: bytes, n: int | None, **sampling: Any
    ) -> bytes:
        most = 2 * len(prompt) + 8 if n is None else n
        return answer(model, cast(SyntheticDataConfig, config.data).task, prompt, most, **sampling)

    @classmethod
    def score_lengths(
        cls, config: RunConfig, lengths: tuple[int, ...], evaluate: Evaluate, test_bytes: int | None
    ) -> Record:
        """Return the share of exact answers at these sizes and their pairs, where the largest is beyond training."""
        trained = cast(SyntheticDataConfig, config.data).longest
        check_beyond(lengths, trained, "data.longest")
        score = evaluate(lengths=lengths)
        further = [cell.exact for cell in score.grid if max(cell.sizes) > trained]
        return {"beyond": mean(further), "grid": [[*cell.sizes, round(cell.exact, 4)] for cell in score.grid]}

    @classmethod
    def streams(cls, config: RunConfig) -> int:
        return cast(SyntheticDataConfig, config.data).seq_len

    def model_facts(self, model: LM) -> Record:
        return streaming_cost(model, self.sequences.longest_row())


def answer(model: LM, task: str, prompt: bytes, n: int, **sampling: Any) -> bytes:
    """Return a prompt of characters with the answer that a model writes, up to its ";" or at most n characters.

    Raises:
        MixerError: for a task without characters, and for a prompt with others.
    """
    if task not in CHARACTER_TASKS:
        raise MixerError(f"sample: sequences of {task} are no text; only {', '.join(CHARACTER_TASKS)} are.")
    text = prompt.decode(errors="replace")
    if not text or any(c not in CHARACTERS for c in text):
        raise MixerError(
            f"sample: a prompt for {task} ({CHARACTER_TASKS[task].about}) is made of {CHARACTERS}, as in "
            + f"'12+345=' for addition; got {text!r}."
        )
    tokens = torch.tensor([[CHARACTERS.index(c) for c in text]], device=next(model.parameters()).device)
    written = text_of(model.generate(tokens, n, **sampling)[0, len(text) :])
    end = written.find(";")
    return (text + (written if end < 0 else written[: end + 1])).encode()
