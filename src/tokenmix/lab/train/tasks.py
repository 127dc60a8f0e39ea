"""The tasks of this package, and the choice of one by config."""

from __future__ import annotations

from pathlib import Path

from .config import RunConfig
from .document_task import MaskedTask, NextTask, SpanTask
from .flow_task import FlowTask
from .image_tasks import ClassifyTask, DensityTask
from .label_task import LabelTask
from .masked_image_task import MaskedImageTask
from .own import OwnTask
from .pair_task import PairTask
from .point_task import PartTask, PointClassTask
from .registry import find_task, register_task
from .segmentation_task import SegmentationTask
from .synthetic_task import SyntheticTask
from .task import Task
from .text_task import TextTask

OWN: tuple[type[Task], ...] = (
    *(TextTask, ClassifyTask, DensityTask, FlowTask, MaskedImageTask, SyntheticTask, PairTask),
    *(NextTask, MaskedTask, SpanTask, LabelTask, PointClassTask, PartTask, SegmentationTask, OwnTask),
)
"""In the order in which messages list their kinds of data; the first is the default."""
for _task in OWN:
    register_task(_task)


def task_of(config: RunConfig) -> type[Task]:
    """Return the class of a config's task, whose data stay closed."""
    return find_task(config.data, config.model)


def open_task(config: RunConfig, folder: Path | None = None) -> Task:
    """Open the task of a config and its data.

    Args:
        folder: of a run that exists, which holds the task's own files; None: for a new run.
    """
    return task_of(config)(config, folder)


def match_data(config: RunConfig) -> RunConfig:
    """Return the config with the model's classes, parts, channels and image size taken from its data.

    The config of a model that predicts text is returned unchanged.
    """
    return task_of(config).match(config)
