"""The choice of a task by config."""

from __future__ import annotations

from .config import RunConfig
from .image_tasks import ClassifyTask, DensityTask, match_image_data
from .task import Task
from .text_task import TextTask


def open_task(config: RunConfig) -> Task:
    """Open the task of a config and its data."""
    if config.model.kind == "lm":
        return TextTask(config)
    return DensityTask(config) if config.model.kind == "image_density" else ClassifyTask(config)


def match_data(config: RunConfig) -> RunConfig:
    """Return the config with the model's classes, channels and image size taken from its data.

    The config of a text run is returned unchanged.
    """
    if config.data.kind != "images":
        return config
    return match_image_data(config)
