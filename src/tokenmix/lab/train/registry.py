"""The kinds of data, and the tasks that each of them has, by name: what a config names, and what a file registers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ...errors import MixerError
from ...models import ModelConfig
from ...system.config import Json, OpenJson
from ...system.modules import import_named

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class OwnModel(Json):
    """A model of one's own, which ``train`` is given as an object."""

    kind = "own"


TASKS: dict[str, list[type[Any]]] = {}
"""The tasks of each kind of data, of which one trains each kind of model; the first kind is the default."""


class TaskData(OpenJson):
    """Base of the configs of data. Each is a frozen dataclass with a constant ``kind``, by which JSON names it."""

    kind: ClassVar[str]

    @classmethod
    def kinds(cls, kind: object = None) -> list[type[Any]]:
        """Return the configs of all kinds of data, with that of ``kind`` if only its module has it yet."""
        if isinstance(kind, str) and ":" in kind and kind not in TASKS:
            import_named(kind.partition(":")[0], "config", f"the kind of data {kind!r}")
            if kind not in TASKS:
                raise MixerError(f"config: data.kind={kind!r}: the module registers no such task (`register_task`).")
        return [tasks[0].config for tasks in TASKS.values()]


def register_task(task: T) -> T:
    """Make a subclass of ``Task`` known; used as a decorator.

    A kind of data without a name is called as its task: "module:Class", by which a run finds its module again.

    Raises:
        MixerError: if the task states no config of data or no kind of model.
    """
    found: Any = task
    if not isinstance(getattr(found, "config", None), type) or not issubclass(found.config, TaskData):
        raise MixerError(f"register_task: {task.__name__}.config must be a dataclass derived from TaskData.")
    if not getattr(found, "models", ()):
        raise MixerError(f"register_task: {task.__name__}.models must name kinds of models, such as ('encoder',).")
    if not hasattr(found.config, "kind"):
        module = task.__module__
        if module == "__main__":
            module = Path(sys.modules[module].__file__ or module).stem
        found.config.kind = f"{module}:{task.__name__}"
    others = [each for each in TASKS.get(found.config.kind, []) if each.__qualname__ != task.__qualname__]
    TASKS[found.config.kind] = [*others, task]
    return task


def default_data() -> TaskData:
    """Return the config of the first kind of data with its defaults."""
    return next(iter(TASKS.values()))[0].config()


def all_tasks() -> list[type[Any]]:
    """Return every task that is registered."""
    return [task for tasks in TASKS.values() for task in tasks]


def find_task(data: TaskData, model: ModelConfig | OwnModel) -> type[Any]:
    """Return the task that trains this kind of model on this kind of data, by their configs.

    Raises:
        MixerError: if there is none; the error names the kinds of data that the model is trained on.
    """
    found = next((task for task in TASKS.get(data.kind, []) if model.kind in task.models), None)
    if found is None:
        kinds = dict.fromkeys(task.config.kind for task in all_tasks() if model.kind in task.models)
        wanted = [kind for kind in kinds if kind != OwnModel.kind] or kinds  # batches of one's own fit any model
        raise MixerError(
            f"config: a model of kind {model.kind!r} is trained on data of kind "
            + f"{' or '.join(map(repr, wanted))}, got {data.kind!r}."
        )
    return found
