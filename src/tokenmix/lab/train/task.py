"""The task of a run: where batches come from, what the loss is, how models are scored."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import MixerError
from ...models import evaluation_mode
from ...system.calls import call_model as call_by_name
from ...system.files import whole_file
from ...system.machine import autocast
from ...types import Options, Record
from ..data.augment_ops import generator
from ..data.inventory import Inventory
from .config import RunConfig
from .constant import Constant, shares
from .registry import TaskData

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a model reads: one tensor, or a named tuple or a dictionary of its arguments."""


def map_inputs(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return inputs of the same form with every tensor changed."""
    found: Inputs = pytree.tree_map(change, inputs)
    return found


def parts_of(inputs: Inputs, n: int) -> list[Inputs]:
    """Return what the model reads for each of n parts of a batch, or of fewer if it has fewer rows."""
    tensors, form = pytree.tree_flatten(inputs)
    return [pytree.tree_unflatten(part, form) for part in zip(*(each.chunk(n) for each in tensors), strict=True)]


def first_of(inputs: Inputs) -> Tensor:
    """Return the first argument of a model."""
    found: Tensor = pytree.tree_leaves(inputs)[0]
    return found


def call_model(model: nn.Module, inputs: Inputs, device: torch.device) -> Any:
    """Return what a model makes of its inputs, moved to its device."""
    moved: Any = map_inputs(lambda tensor: tensor.to(device, non_blocking=True), inputs)
    return call_by_name(model, moved._asdict() if hasattr(moved, "_asdict") else moved)


def zero_loss(outputs: Tensor) -> Tensor:
    """Return a loss over no targets: 0, with a gradient of 0 through all of the outputs."""
    return outputs.float().sum() * 0.0


def check_unchanged(what: str, then: Record | None, now: Record) -> None:
    """Refuse data whose facts are not those that a run recorded, but for its name: a folder may have moved."""
    told = {key: (then.get(key), now.get(key)) for key in {**then, **now} if key != "name"} if then else {}
    changed = [
        f"{key} was {_shorten_fact(old)}, now {_shorten_fact(new)}" for key, (old, new) in told.items() if old != new
    ]
    if changed:
        raise MixerError(
            f"the {what} {now['name']} changed since this run began: {'; '.join(changed)}; restore the old ones, or "
            + "start a new run."
        )


def _shorten_fact(fact: object) -> str:
    return f"{fact[:16]}..." if isinstance(fact, str) and len(fact) > 16 else str(fact)


Evaluate = Callable[..., Any]
"""Scores a run that has ended; the options are those of ``evaluate_run``, without the run."""


def per_cent(score: object, *names: str) -> dict[str, float]:
    """Return the shares of a score on the test split that are not None, in per cent, as a sweep records them."""
    found = {f"test_{name}": getattr(score, name) for name in names}
    return {name: round(100 * share, 3) for name, share in found.items() if share is not None}


def record_seconds(evaluate: Callable[P, S]) -> Callable[P, S]:
    """Make an evaluation compute no gradients, and its score hold the seconds that it took."""

    @wraps(evaluate)
    def score(*args: P.args, **options: P.kwargs) -> S:
        began = time.perf_counter()
        with torch.no_grad():
            found: Any = evaluate(*args, **options)
        return cast(S, replace(found, seconds=time.perf_counter() - began))

    return score


def groups_of(items: Iterable[T], n: int) -> Iterator[list[T]]:
    """Yield lists of up to n items."""
    left = iter(items)
    while group := list(islice(left, n)):
        yield group


class Score(Protocol):
    """The result of an evaluation: a dataclass whose fields go into metrics.jsonl."""

    def text(self) -> str:
        """Return the result as one readable line."""


class Task(ABC):
    """One kind of data and what a model learns of it: config, batches, loss, score, and all that is said of them.

    A subclass becomes known by ``register_task``. What the loop calls are methods; what others ask before any data is
    opened are attributes and class methods.

    Args:
        config: the config of the data.
        models: kinds of models that are trained so.
        movable: fields of that config that may change in the middle of a run, as where the data lies.
        matches: whether sizes of the model follow from the data; see ``match``.
        sets: the named sets of data, which ``--data`` takes beside paths.
        downloads: those of them that are downloaded, for which a path is that of a local copy.
        reads: fields of ``train`` that only some kinds of data know, and this one does.
        writes: how a model is sampled by `tokenmix sample`: "write" (continue a prompt), "translate", "fill" (masks),
            "classify" (a text), "draw" (images), "generate" (images from noise); "": it is not.
        temperature: at which a prompt is continued by default.
        tokens: what the tokens of texts are: "bytes", "characters" or "subwords"; "": there are none.
        framed: whether a text of subwords has a start token, and whether it has an end token.
        scored: fields of the config that say on what a row of a sweep is scored; rows of one comparison share them.
            None: all fields of the data.
        reads_with: fields of the config that are only read with some values of another one: that field, and these.
        metric: field of the score that decides which checkpoint is the best.
        higher: whether higher scores are better.
        label: what a report calls the score; "": the metric's own name.
        unit: what speed is counted in.
        options: what ``evaluate`` takes beside the model and the split.
        shares_tokens: whether inputs and targets are (B, T), and the loss of a part of the columns is that of a part of
            the batch.
        outputs: field of the model's config with the number of its outputs.
        places: what has a target each: see ``Constant``.
        folder: (of the constructor) an existing run, which holds the task's own files; None: for a new run.
    """

    config: ClassVar[type[TaskData]]
    models: ClassVar[tuple[str, ...]] = ()
    movable: ClassVar[tuple[str, ...]] = ()
    matches: ClassVar[bool] = False
    sets: ClassVar[Collection[str]] = ()
    downloads: ClassVar[Collection[str]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[str] = ""
    temperature: ClassVar[float] = 0.8
    tokens: ClassVar[str] = ""
    framed: ClassVar[tuple[bool, bool]] = (False, False)
    scored: ClassVar[tuple[str, ...] | None] = None
    reads_with: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {}
    metric: ClassVar[str]
    higher: ClassVar[bool] = False
    label: ClassVar[str] = ""
    unit: ClassVar[str] = "tokens"
    options: ClassVar[tuple[str, ...]] = ()
    shares_tokens: ClassVar[bool] = False
    outputs: ClassVar[str] = "vocab"
    places: ClassVar[int] = 1

    def __init__(self, config: RunConfig, folder: Path | None = None):
        self.train = config.train
        # Their classes are those the task is for.
        self.model: Any = config.model
        self.data: Any = config.data

    @staticmethod
    def generator(*numbers: int) -> torch.Generator:
        """Return a generator of random numbers that is a function of these, such as the seed and the step."""
        return generator(*numbers)

    @classmethod  # noqa: B027  (optional)
    def check(cls, config: RunConfig) -> None:
        """Refuse options of the data that are out of range, or that the model is not trained with."""

    @classmethod
    def fields_of(cls, data: Any, given: str) -> Options:
        """Return the fields of the config that ``--data`` sets.

        A name sets ``data.source``, and so does a path, unless the config names a set that is usually downloaded: then
        the path is that of a local copy, and sets ``data.path``.
        """
        if given in cls.sets:
            return {"data.source": given}
        found = Path(given).expanduser()
        path = str(found.resolve()) if found.exists() else given  # errors about a missing path quote it as it was typed
        return {"data.path" if cls.downloads and data.source in cls.downloads else "data.source": path}

    @classmethod
    def score(cls) -> Record:
        """Return what env.json records of the score, for reports, which do not import tasks."""
        return {"metric": cls.metric, "label": cls.label or cls.metric.replace("_", " "), "higher": cls.higher}

    @classmethod
    def match(cls, config: RunConfig) -> RunConfig:
        """Return the config with sizes of the model, such as its classes, taken from the data."""
        return config

    def files(self) -> dict[str, str]:
        """Return the files, by name, that a run needs beside its checkpoints; they are written into a new run."""
        return {}

    def facts(self) -> Record:
        """Return what env.json records of the data, by names that no other task has."""
        return {}

    def inventory(self) -> Inventory | None:
        """Return what was found of the user's data and what was left out; None: there is nothing to say."""
        return None

    def check_same(self, env: Record) -> None:
        """Refuse data that is not what the run was trained on; by default, data of other facts."""
        for what, now in self.facts().items():
            check_unchanged(what, env.get(what), {"name": what, **now})

    def units(self) -> int:
        """Return the number of tokens or images per step; by default, of examples."""
        return self.train.batch_size

    @abstractmethod
    def batch(self, step: int) -> tuple[Inputs, Tensor]:
        """Return inputs and targets of a step, a pure function of the config's seed and the step.

        Inputs that are a named tuple are the arguments of the model, by their names.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss in nats."""

    def count_targets(self, targets: Tensor) -> int:
        """Return how many of the targets the loss is a mean of; by default each row counts alike."""
        return len(targets)

    def train_fields(self, loss: float) -> Record:
        """Return further fields of a line of training metrics, beside the loss."""
        return {}

    @abstractmethod
    def evaluate(self, model: nn.Module, split: str, /, *args: Any, **options: Any) -> Any:
        """Score the model on a split, or on the part of it that the options select."""

    def answers(self, model: nn.Module, batches: Iterable[tuple[Inputs, T]]) -> Iterator[tuple[Any, T]]:
        """Yield what a model says of each batch, in evaluation mode, and what came beside the inputs."""
        device = next(model.parameters()).device
        with evaluation_mode(model):
            for inputs, beside in batches:
                with autocast(device, self.train.precision):
                    said = call_model(model, inputs, device)
                yield said, beside

    def eval_options(self) -> Options:
        """Return the options of the evaluations during training."""
        return {}

    def constant(self) -> nn.Module:
        """Return the model that reads nothing, and says of every target what share of those of training it is."""
        return Constant(shares(self.batch, getattr(self.model, self.outputs)), self.places)

    def floor(self) -> float:
        """Return the score of that model on validation, as models are scored in training."""
        found: float = getattr(self.evaluate(self.constant(), "valid", **self.eval_options()), self.metric)
        return found

    def yardsticks(self) -> dict[str, float]:
        """Return further floors by name: scores, on the same part of validation, of what learns nothing."""
        return {}

    @classmethod
    def score_test_split(cls, evaluate: Evaluate, test_bytes: int | None) -> Record:
        """Return what a sweep records of the test split for a final run; by default nothing.

        Args:
            evaluate: scores the run.
            test_bytes: leading bytes of the split that a text is scored on; None: no test of texts.
        """
        return {}

    @classmethod
    def score_lengths(
        cls, config: RunConfig, lengths: tuple[int, ...], evaluate: Evaluate, test_bytes: int | None
    ) -> Record:
        """Score a run beyond the lengths of its training: as "beyond", and in detail.

        Raises:
            MixerError: where the data has no lengths, or none of these lies beyond.
        """
        raise MixerError(f"sweep: lengths are for text and synthetic sequences, not for {cls.config.kind}.")

    @classmethod
    def streams(cls, config: RunConfig) -> int | None:
        """Return the length of a sequence, of a language model whose state after it is recorded; None: of others."""
        return None

    @classmethod
    def trial(cls, config: RunConfig) -> Options:
        """Return changes to the config that make a trial of two steps shorter."""
        return {}

    def better(self, score: float, best: float | None) -> bool:
        """Return whether a score is the best so far."""
        return best is None or (score > best if self.higher else score < best)

    @classmethod
    def label_names(cls, run: Path) -> list[str]:
        """Return the names of the classes of texts that a run keeps; [] where its model classifies none."""
        return []

    @classmethod
    def continue_text(
        cls, config: RunConfig, run: Path, model: Any, prompt: bytes, n: int | None, **sampling: object
    ) -> bytes:
        """Return a prompt and what a run's language model writes after it; see ``sample_run``."""
        raise NotImplementedError

    @classmethod
    def translate_text(cls, config: RunConfig, run: Path, model: Any, text: str, **sampling: object) -> str:
        """Return what a run's encoder-decoder writes for a source; see ``translate_run``."""
        raise NotImplementedError

    def sample(self, model: Any, folder: Path, step: int) -> None:  # noqa: B027  (optional)
        """Write samples of the model into the folder, if this task makes any."""

    @staticmethod
    def write_sample(folder: Path, step: int, text: str | bytes) -> None:
        """Write a text as the sample of a step."""
        with whole_file(folder / f"step_{step:08d}.txt") as f:
            f.write(text.encode() if isinstance(text, str) else text)

    def model_facts(self, model: Any) -> Record:
        """Return what env.json records of the model beside the number of its parameters."""
        return {}
