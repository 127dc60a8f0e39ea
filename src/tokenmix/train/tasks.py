"""The choice of a task by config."""

from __future__ import annotations

from .config import RunConfig
from .image_tasks import ClassifyTask, DensityTask, match_image_data
from .synthetic_task import SyntheticTask
from .task import Task
from .text_task import TextTask


def task_of(config: RunConfig) -> type[Task]:
    """Return the class of a config's task, whose data stay closed."""
    if config.data.kind == "synthetic":
        return SyntheticTask
    if config.model.kind == "lm":
        return TextTask
    return DensityTask if config.model.kind == "image_density" else ClassifyTask


def open_task(config: RunConfig) -> Task:
    """Open the task of a config and its data."""
    return task_of(config)(config)


def match_data(config: RunConfig) -> RunConfig:
    """Return the config with the model's classes, channels and image size taken from its data.

    The config of a language model is returned unchanged.
    """
    if config.data.kind != "images":
        return config
    return match_image_data(config)
