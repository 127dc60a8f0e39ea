"""Which task a config is about."""

from __future__ import annotations

from .config import RunConfig
from .image_tasks import ClassifyTask, DensityTask, matched
from .task import Task
from .text_task import TextTask


def open_task(config: RunConfig) -> Task:
    """The task of a config, its data opened."""
    if config.model.kind == "lm":
        return TextTask(config)
    return DensityTask(config) if config.model.kind == "image_density" else ClassifyTask(config)


def match_data(config: RunConfig) -> RunConfig:
    """The config with the model's classes, channels and image size those of its data; a config of text as it is."""
    if config.data.kind != "images":
        return config
    return matched(config)
