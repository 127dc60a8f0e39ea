"""What a run is about: where its batches come from, what its loss is, how it is scored. The loop knows nothing else of text or images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from .config import RunConfig


class Score(Protocol):
    """What an evaluation found: a dataclass whose fields go into metrics.jsonl."""

    def text(self) -> str:
        """For reading, in one line."""


class Task(ABC):
    """Data, loss and score of one kind of model.

    Args:
        metric: the field of a score that decides which checkpoint is the best.
        higher: whether a higher one is better.
        unit: what speed counts.
    """

    metric: ClassVar[str]
    higher: ClassVar[bool] = False
    unit: ClassVar[str] = "tokens"

    def __init__(self, config: RunConfig):
        self.train = config.train
        self.model: Any = config.model  # of the class, and
        self.data: Any = config.data  # of the kind that the task is for

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What env.json records of the data."""

    @abstractmethod
    def check_same(self, env: dict[str, Any]) -> None:
        """Refuse data that is not what the run was trained on."""

    @abstractmethod
    def units(self) -> int:
        """Tokens or images of one step."""

    @abstractmethod
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, a pure function of the config's seed and the step."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats."""

    def train_fields(self, loss: float) -> dict[str, Any]:
        """What a line of training metrics says beside the loss."""
        return {}

    @abstractmethod
    def evaluate(self, model: Any, split: str, /, *args: Any, **options: Any) -> Any:
        """Score the model on all of a split, or what the options say."""

    @abstractmethod
    def while_training(self) -> dict[str, Any]:
        """The options of the evaluations within a training."""

    def better(self, score: float, best: float | None) -> bool:
        """Whether a score is the best so far."""
        return best is None or (score > best if self.higher else score < best)

    def sample(self, model: Any, folder: Path, step: int) -> None:  # noqa: B027  (most tasks make nothing)
        """Write what the model makes into the folder of samples, where it makes anything."""

    def model_facts(self, model: Any) -> dict[str, Any]:
        """What env.json records of the model beside its parameters."""
        return {}
