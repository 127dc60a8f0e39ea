"""What the tasks on texts in subwords share: rows of texts, the tokenizer that a run keeps, and checks of both."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ...system.files import check_own
from ...types import Record
from ..data.inventory import Inventory
from ..data.pair_sampler import IGNORED
from ..data.rows import Rows
from ..data.subwords import END, START, Subwords
from .config import RunConfig
from .rundir import RunDir
from .task import Task

TOKENIZER = "tokenizer.json"


def read_tokenizer(run: Path) -> Subwords:
    """Load the tokenizer that a run keeps.

    Raises:
        MixerError: if it is not the one that the run was trained with, whose numbers mean other texts.
    """
    check_own(run / TOKENIZER, run)
    found, then = Subwords.load(run / TOKENIZER), recorded_texts(run)
    if then and then.get("tokenizer") != found.sha256:
        raise MixerError(
            f"{run / TOKENIZER} changed since the run began: sha256 was {str(then.get('tokenizer'))[:16]}..., "
            + f"is {found.sha256[:16]}...; restore the old one."
        )
    return found


def recorded_texts(run: Path) -> Record:
    """Return what a run's env.json records of its texts, see ``SubwordTask.same``; empty if it records nothing."""
    found: Record = RunDir(run).env().get("texts", {}) if (run / "env.json").is_file() else {}
    return found


def token_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Compute the mean cross-entropy of logits (B, T, V) at the targets (B, T) that are not ``IGNORED``, in nats."""
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
    )


def token_nats(logits: Tensor, targets: Tensor) -> float:
    """Return the sum of the same cross-entropies, in float64."""
    return float(
        F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    )


def token_count(targets: Tensor) -> int:
    """Return the number of targets that are not ``IGNORED``."""
    return int((targets != IGNORED).sum())


def check_subwords(data: Any, model: Any, least: int) -> None:
    """Refuse sizes of texts in subwords that are out of range; ``least`` is the shortest ``max_tokens``."""
    if not least <= data.max_tokens <= model.max_len:
        raise MixerError(
            f"config: data.max_tokens must be in {least}..model.max_len={model.max_len}, got {data.max_tokens}."
        )
    if data.batch_tokens is not None and data.batch_tokens < 4:
        raise MixerError(f"config: data.batch_tokens must be at least 4, got {data.batch_tokens}.")
    ends = getattr(model, "start", START), getattr(model, "end", END)
    if ends != (START, END):
        raise MixerError(
            f"config: tokenizers start a text with token {START} and end it with token {END}; model.start and "
            + f"model.end must be these, got {ends[0]} and {ends[1]}."
        )


def check_source(tokens: list[int], most: int) -> None:
    """Refuse a source for an encoder-decoder that is empty, or longer than those of training."""
    if not tokens or len(tokens) >= most:
        raise MixerError(
            f"sample: the source must have 1 to {most - 1} subwords (data.max_tokens), got {len(tokens)}; "
            + "give it with --prompt."
        )


class SubwordTask(Task):
    """A task on texts that are cut into subwords."""

    tokens = "subwords"
    sentinels = 0
    text: Rows

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        self.text = self.open_text()
        self.subwords = self._tokenizer(folder)

    @abstractmethod
    def open_text(self) -> Rows:
        """Open the rows of texts of the config."""

    @abstractmethod
    def texts(self) -> Iterable[str]:
        """Yield the texts that a tokenizer is trained on."""

    def _tokenizer(self, folder: Path | None) -> Subwords:
        """Return the run's own tokenizer, else that of the config or of the weights to start from, else a new one."""
        if folder is not None:
            return read_tokenizer(folder)
        given = self.data.tokenizer
        if given is None and self.train.init is not None and (Path(self.train.init) / TOKENIZER).is_file():
            given = str(Path(self.train.init) / TOKENIZER)
            found = read_tokenizer(Path(self.train.init))
        elif given is None:
            return Subwords.train(self.texts(), self.model.vocab, sentinels=self.sentinels)
        else:
            found = Subwords.load(given)
        if found.vocab > self.model.vocab:
            raise MixerError(
                f"{given} has {found.vocab:,} tokens, more than model.vocab={self.model.vocab:,}; set model.vocab to "
                + f"{found.vocab}."
            )
        if self.sentinels and not found.sentinels:
            raise MixerError(
                f"{given} has no sentinels (<extra_0>, <extra_1>, ...), which stand for the spans that an "
                + "encoder-decoder fills in; leave data.tokenizer out to train one on the corpus."
            )
        return found

    def files(self) -> dict[str, str]:
        return {TOKENIZER: self.subwords.json}

    def facts(self) -> Record:
        return {"texts": self.same()}

    def same(self) -> Record:
        """Return what env.json records of texts and tokenizer."""
        rows = {name: len(found) for name, found in self.text.splits.items()}
        facts = {"name": self.text.name, "rows": rows, "sha256": self.text.sha256}
        return {**facts, "tokens": self.subwords.vocab, "tokenizer": self.subwords.sha256}

    def inventory(self) -> Inventory | None:
        return self.text.inventory

    def check_same(self, env: Record) -> None:
        then = env.get("texts", {})
        if then and then.get("sha256") != self.text.sha256:
            raise MixerError(
                f"the texts of {self.text.name} changed since this run began: sha256 was "
                + f"{str(then.get('sha256'))[:16]}..., is {self.text.sha256[:16]}...; restore the old ones, or start a "
                + "new run."
            )
