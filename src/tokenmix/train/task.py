"""The task of a run: where batches come from, what the loss is, how models are scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from .config import RunConfig


class Score(Protocol):
    """The result of an evaluation: a dataclass whose fields go into metrics.jsonl."""

    def text(self) -> str:
        """Return the result as one readable line."""


class Task(ABC):
    """Data, loss and score of one kind of model.

    Args:
        metric: field of the score that decides which checkpoint is the best.
        higher: whether higher scores are better.
        unit: what speed is counted in.
        options: what ``evaluate`` takes beside the model and the split.
    """

    metric: ClassVar[str]
    higher: ClassVar[bool] = False
    unit: ClassVar[str] = "tokens"
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: RunConfig):
        self.train = config.train
        # Their classes are those the task is for.
        self.model: Any = config.model
        self.data: Any = config.data

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what env.json records of the data."""

    @abstractmethod
    def check_same(self, env: dict[str, Any]) -> None:
        """Refuse data that is not what the run was trained on."""

    @abstractmethod
    def units(self) -> int:
        """Return the number of tokens or images per step."""

    @abstractmethod
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step, a pure function of the config's seed and the step."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss in nats."""

    def train_fields(self, loss: float) -> dict[str, Any]:
        """Return further fields of a line of training metrics, beside the loss."""
        return {}

    @abstractmethod
    def evaluate(self, model: Any, split: str, /, *args: Any, **options: Any) -> Any:
        """Score the model on a split, or on the part of it that the options select."""

    @abstractmethod
    def while_training(self) -> dict[str, Any]:
        """Return the options of the evaluations during training."""

    def better(self, score: float, best: float | None) -> bool:
        """Return whether a score is the best so far."""
        return best is None or (score > best if self.higher else score < best)

    def sample(self, model: Any, folder: Path, step: int) -> None:  # noqa: B027  (optional)
        """Write samples of the model into the folder, if this task makes any."""

    def model_facts(self, model: Any) -> dict[str, Any]:
        """Return what env.json records of the model beside the number of its parameters."""
        return {}
