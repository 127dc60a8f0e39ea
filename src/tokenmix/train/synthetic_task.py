"""Synthetic sequences: associative recall and copying, scored by the share of right answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.recall import IGNORED
from ..errors import MixerError
from ..models import evaluating
from ..system.machine import autocast
from .config import RunConfig
from .task import Task
from .text_task import streaming_cost


@dataclass(frozen=True)
class SyntheticScore:
    """The accuracy of a language model on the ``targets`` scored positions of some sequences.

    Attributes:
        accuracy: fraction of the targets that are the model's first guess.
        cross_entropy: mean cross-entropy of the targets in nats.
    """

    accuracy: float
    cross_entropy: float
    targets: int
    sequences: int
    seq_len: int
    seconds: float

    def text(self) -> str:
        return (
            f"{100 * self.accuracy:.2f} % right, cross-entropy {self.cross_entropy:.4f} over {self.targets:,} targets "
            + f"in {self.sequences:,} sequences of {self.seq_len} tokens"
        )


class SyntheticTask(Task):
    """Train a language model on sequences that are drawn as it goes on."""

    metric = "accuracy"
    higher = True

    def __init__(self, config: RunConfig):
        super().__init__(config)
        self.sequences = self.data.sequences(self.model.vocab)

    def facts(self) -> dict[str, Any]:
        data, drawn = self.data, self.sequences
        shape = {"seq_len": drawn.seq_len, "vocab": drawn.vocab}
        return {
            "synthetic": {"name": drawn.task, **shape, "held_out": data.held_out, "sha256": drawn.sha256(data.held_out)}
        }

    def check_same(self, env: dict[str, Any]) -> None:
        then, now = env.get("synthetic"), self.facts()["synthetic"]
        if then and then != now:
            raise MixerError(
                f"the sequences of {now['name']} are not those that this run was trained on: they were {then}, now "
                + f"{now}; use the torch that drew them, or start a new run."
            )

    def units(self) -> int:
        return self.train.batch_size * self.data.seq_len

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.sequences.batch(self.train.batch_size, seed=self.train.seed, step=step)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    @torch.no_grad()
    def evaluate(self, model: Any, split: str, /, **options: Any) -> SyntheticScore:
        """Score the model on all sequences of a split; those of "train" are the first that training has drawn.

        Raises:
            MixerError: for an unknown split, and for options, of which there are none.
        """
        if options:
            raise MixerError(f"eval: {self.data.task} is scored as a whole; leave out {', '.join(options)}.")
        began = time.perf_counter()
        tokens, targets = self.split(split)
        device, right, nats, n = next(model.parameters()).device, 0, 0.0, 0
        with evaluating(model):
            for x, y in zip(tokens.split(self.train.eval_batch), targets.split(self.train.eval_batch), strict=True):
                with autocast(device, self.train.precision):
                    logits = model(x.to(device))
                scored = y.to(device) != IGNORED
                logits, wanted = logits.float()[scored], y.to(device)[scored]
                right, n = right + int((logits.argmax(-1) == wanted).sum()), n + len(wanted)
                nats += float(F.cross_entropy(logits.double(), wanted, reduction="sum"))
        return SyntheticScore(right / n, nats / n, n, len(tokens), tokens.shape[1], time.perf_counter() - began)

    def split(self, name: str) -> tuple[Tensor, Tensor]:
        """Return tokens and targets (B, T) of a split, both int64."""
        count = self.data.held_out
        if name != "train":
            return self.sequences.held_out(name, count)
        drawn = [self.batch(step) for step in range(-(-count // self.train.batch_size))]
        tokens, targets = (torch.cat(parts)[:count] for parts in zip(*drawn, strict=True))
        return tokens, targets

    def while_training(self) -> dict[str, Any]:
        return {}

    def model_facts(self, model: Any) -> dict[str, Any]:
        return streaming_cost(model, self.data.seq_len)
