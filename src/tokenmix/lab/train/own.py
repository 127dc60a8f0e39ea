"""Parts of a run that are objects of the user's own: model, batches, loss, optimiser, schedule, callbacks, logger."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models import KINDS, build_model
from ...types import Record
from ..data.pair_sampler import IGNORED
from .config import RunConfig
from .optim import learning_rate
from .own_objects import digest, fingerprint, import_object, name_of, pack_state, unpack_state
from .registry import OwnModel, TaskData
from .rundir import plain_numbers
from .task import Inputs, Task, record_seconds

Batch = tuple[Inputs, Tensor]
FORMS = {
    "model": "a module, or a function that builds one",
    "batches": "a function of the step, a list or a loader",
    "valid": "a list or a loader of batches",
    "optimizer": "a function of the parameters, or an optimiser",
    "callbacks": "a list of functions, or of objects with on_step or on_evaluate",
}
"""What a part may be; others are functions."""


@dataclass(frozen=True)
class OwnData(TaskData):
    """Batches of one's own, which ``train`` is given as an object."""

    kind = "own"


@dataclass(frozen=True)
class OwnScore:
    """The mean loss over the batches of validation, None where there are none."""

    loss: float | None
    seconds: float = 0.0

    def text(self) -> str:
        return "no validation batches" if self.loss is None else f"loss {self.loss:.4f}"


@dataclass(frozen=True)
class Parts:
    """What a run takes from its caller in place of what its config says; see ``train``."""

    model: nn.Module | Callable[[], nn.Module] | None = None
    batches: Callable[[int], Batch] | Iterable[Batch] | None = None
    valid: Iterable[Batch] | None = None
    loss: Callable[[Any, Tensor], Tensor] | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | torch.optim.Optimizer | None = None
    schedule: Callable[[int], float] | None = None
    callbacks: Sequence[Any] = ()
    on_log: Callable[[Record], object] | None = None

    def __post_init__(self) -> None:
        listed = isinstance(self.callbacks, Sequence)
        for name, each in (self.objects() if listed else {"callbacks": self.callbacks}).items():
            part, iterable = name.partition(".")[0], hasattr(each, "__iter__")
            others = {
                "batches": iterable,
                "optimizer": isinstance(each, torch.optim.Optimizer),
                "callbacks": _has_methods(each),
            }
            fits = iterable if part == "valid" else callable(each) or others.get(part, False)
            if not fits or not listed:
                said = FORMS.get(part, "a function")
                raise MixerError(f"train: {part}= takes {said}, got {type(each).__name__} {str(each)[:60]}.")

    def objects(self) -> dict[str, Any]:
        """Return the parts that were given, by name; each callback has a number."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "callbacks"}
        given |= {f"callbacks.{i}": each for i, each in enumerate(self.callbacks)}
        return {name: each for name, each in given.items() if each is not None}

    @cached_property
    def record(self) -> dict[str, Any]:
        """What config.json holds of the parts: the names to import, None where there is none, and fingerprints.

        Of batches the first one counts too, where it can be asked for.
        """
        found = {}
        for name, each in self.objects().items():
            marks = {"name": name_of(each), "fingerprint": "" if name == "on_log" else fingerprint(each)}
            if name == "batches" and (callable(each) or isinstance(each, Sequence)):
                marks["first"] = digest(each(0) if callable(each) else each[0])
            found[name] = marks
        return found

    @classmethod
    def load(cls, recorded: dict[str, Any], path: Path | str, only: Sequence[str] = ()) -> Parts:
        """Import the parts of a run by the names in its config.json, where that is allowed; ``only`` some of them.

        Raises:
            MixerError: for a part without a name, and for a module that may not be imported.
        """
        found: dict[str, Any] = {}
        for name, marks in recorded.items():
            if only and name not in only:
                continue
            if marks["name"] is None:
                raise MixerError(
                    f"{path}: its {name} has no name to import (a lambda, or an object made inside a function); call "
                    "train(config, out, resume=True, ...) with the same objects, or define it at the top of a file."
                )
            found[name] = import_object(marks["name"], str(path), f"its {name}")
        callbacks = [found.pop(name) for name in list(found) if name.startswith("callbacks.")]
        return cls(**found, callbacks=callbacks)

    def check_same(self, recorded: dict[str, Any], path: Path | str) -> None:
        """Refuse parts that are not those a run began with; the logger may change."""
        now = self.record
        names = {name for name in {**recorded, **now} if name != "on_log"}
        for name in sorted(names):
            then, given = recorded.get(name), now.get(name)
            if then is None or given is None:
                said = "began with {}= of its own; give it again" if then else "began without {}=; leave it out"
                raise MixerError(f"resume: {path} {said.format(name)}.")
            marks = [mark for mark in ("fingerprint", "first") if then.get(mark) != given.get(mark)]
            if marks:
                what = "the first batch of its batches" if marks == ["first"] else f"the code of its {name}"
                said = f" ({then['name']})" if then["name"] else ""
                raise MixerError(f"resume: {what}{said} is not what {path} began with; restore it, or start a new run.")

    def place_in(self, config: RunConfig) -> RunConfig:
        """Return the config of a run with these parts."""
        data = config.data if self.batches is None else OwnData()
        config = replace(config, data=data, own=self.record)
        for name in ("model", "loss", "batches"):
            needed = isinstance(config.model if name == "model" else config.data, (OwnModel, OwnData))
            if needed and getattr(self, name) is None:
                raise MixerError(f"train: without a config of data and model it takes {name}=.")
        if self.valid is not None and self.batches is None:
            raise MixerError("train: valid= belongs to batches=; the data of the config bring their own.")
        if self.valid is not None and iter(self.valid) is self.valid:
            raise MixerError("train: valid= is read at every evaluation; give a list or a loader, not an iterator.")
        batches = self.batches
        if not (batches is None or callable(batches) or isinstance(batches, Sequence) or _has_state(batches)):
            warnings.warn(
                f"batches ({type(batches).__name__}) has no state_dict, so a resumed run begins it anew and its "
                "numbers differ; a function of the step, a list, or a loader with a state goes on exactly.",
                stacklevel=3,
            )
        return config

    def build_model(self, config: RunConfig) -> nn.Module:
        """Return the model that was given, or else that of the config."""
        given: Any = self.model
        if given is None:
            return build_model(config.model)  # type: ignore[arg-type]  # no OwnModel, which comes with a model
        model = given if isinstance(given, nn.Module) else given()
        if not isinstance(model, nn.Module):
            raise MixerError(f"train: model= gives a {type(model).__name__}; it must be a module, or return one.")
        return model

    def build_optimizer(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimiser that was given; ``scale`` of a group is the highest rate of its own."""
        given: Any = self.optimizer
        wanted = [p for p in model.parameters() if p.requires_grad]
        found = given if isinstance(given, torch.optim.Optimizer) else given(wanted)
        if not isinstance(found, torch.optim.Optimizer):
            raise MixerError(f"train: optimizer= gives a {type(found).__name__}, which is no torch.optim.Optimizer.")
        for group in found.param_groups:
            group["scale"] = float(group["lr"])
        return [found]

    def rate(self, config: RunConfig, step: int) -> float | None:
        """Return what the scale of each group is multiplied by at a step; None: what the config says, of the config's.

        The scales of an optimiser of one's own are its highest rates, those of ours multiples of ``optim.lr``.
        """
        optim, own = config.optim, self.optimizer is not None
        if self.schedule is not None:
            return float(self.schedule(step)) * (1.0 if own else optim.lr)
        return learning_rate(step, optim, config.train.steps) / optim.lr if own else None

    @cached_property
    def _stream(self) -> Iterator[Batch]:
        def endless() -> Iterator[Batch]:
            while True:
                found = None
                for found in self.batches:  # type: ignore[union-attr]  # an iterable here
                    yield found
                if found is None:
                    raise MixerError("train: batches= has no more; give a loader that can be read again.")

        return endless()

    def batch(self, step: int) -> Batch:
        """Return the batch of a step."""
        if callable(self.batches):
            found: Any = self.batches(step)
        elif isinstance(self.batches, Sequence):
            found = self.batches[step % len(self.batches)]
        else:
            found = next(self._stream)
        inputs: Any
        inputs, targets = found if isinstance(found, (tuple, list)) and len(found) == 2 else (None, None)
        if not isinstance(targets, Tensor) or not (isinstance(inputs, (Tensor, dict)) or hasattr(inputs, "_asdict")):
            raise MixerError(
                f"train: batches= gives a {type(found).__name__}; it must be a pair (inputs, targets): targets a "
                "tensor, inputs a tensor, or a dictionary or named tuple with the arguments of the model."
            )
        return inputs, targets

    def notify(self, what: str, step: int, model: nn.Module) -> Record:
        """Call the callbacks that have this method, or are functions for it, and return their numbers."""
        found: Record = {}
        for each in self.callbacks:
            call = getattr(each, what, None) if _has_methods(each) else each if what == "on_evaluate" else None
            found |= plain_numbers(call(step, model) or {}) if call is not None else {}
        return found

    def state(self, optimizers: list[torch.optim.Optimizer]) -> tuple[dict[str, Tensor], Any]:
        """Return the state of all parts that have one, as tensors and JSON."""
        tensors: dict[str, Tensor] = {}
        parts = {n: each for n, each in self.objects().items() if n not in ("model", "optimizer") and _has_state(each)}
        states = {name: each.state_dict() for name, each in parts.items()}
        states |= {"optimizer": optimizers[0].state_dict()} if self.optimizer is not None else {}
        return tensors, {name: pack_state(state, tensors, name) for name, state in states.items()}

    def load_state(self, tensors: dict[str, Tensor], packed: Any, optimizers: list[torch.optim.Optimizer]) -> None:
        """Restore that state."""
        given = self.objects() | {"optimizer": optimizers[0]}
        for name, state in (packed or {}).items():
            given[name].load_state_dict(unpack_state(state, tensors))


def _has_methods(each: object) -> bool:
    return any(hasattr(each, name) for name in ("on_step", "on_evaluate"))


def _has_state(each: object) -> bool:
    return all(callable(getattr(each, name, None)) for name in ("state_dict", "load_state_dict"))


class OwnTask(Task):
    """Batches and a loss that the caller of ``train`` gives."""

    config, models, metric, unit = OwnData, (OwnModel.kind, *KINDS), "loss", "batches"

    def __init__(self, config: RunConfig, folder: Path | None = None, parts: Parts | None = None):
        super().__init__(config)
        self.parts = parts or Parts.load(config.own, folder or "the run", ("batches", "valid", "loss"))

    def units(self) -> int:
        return 1

    def batch(self, step: int) -> Batch:
        return self.parts.batch(step)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self.parts.loss is not None  # ``place_in`` has refused it
        return self.parts.loss(outputs, targets)

    def count_targets(self, targets: Tensor) -> int:
        """Return the number of class targets that are not -100, which torch's cross entropy ignores; else of rows."""
        return len(targets) if targets.is_floating_point() else int((targets != IGNORED).sum())

    @record_seconds
    def evaluate(self, model: nn.Module, split: str, /, *args: Any, **options: Any) -> OwnScore:
        total, count = 0.0, 0
        if split != "valid":
            raise MixerError(f"eval: batches of one's own have the split valid, got {split!r}.")
        device = next(model.parameters()).device
        for said, targets in self.answers(model, self.parts.valid or ()):
            n = self.count_targets(targets)
            total += float(self.loss(said, targets.to(device))) * n if n else 0.0
            count += n
        return OwnScore(total / count if count else None)


def run_model(config: RunConfig, path: Path | str) -> nn.Module:
    """Build the model of an existing run: that of its config, or the user's own, if it may be imported."""
    only = ("model",)
    return (Parts.load(config.own, path, only) if "model" in config.own else Parts()).build_model(config)
