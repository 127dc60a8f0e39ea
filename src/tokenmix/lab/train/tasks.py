"""The choice of a task by config."""

from __future__ import annotations

from pathlib import Path

from .config import RunConfig
from .document_task import DocumentTask, MaskedTask, NextTask, SpanTask
from .flow_task import FlowTask
from .image_tasks import ClassifyTask, DensityTask, ImageTask, match_image_data
from .label_task import LabelTask, labels_of
from .masked_image_task import MaskedImageTask
from .pair_task import PairTask
from .point_task import PartTask, PointClassTask, match_points
from .segmentation_task import SegmentationTask, match_mask_data
from .synthetic_task import SyntheticTask
from .task import Task
from .text_task import TextTask

ON_DOCUMENTS: dict[str, type[DocumentTask]] = {"lm": NextTask, "encoder": MaskedTask, "seq2seq": SpanTask}
"""What each kind of model learns of documents."""
ON_IMAGES: dict[str, type[ImageTask]] = {"image_density": DensityTask, "dit": FlowTask, "mae": MaskedImageTask}
"""What a model learns of images, by its kind; the others classify them."""


def task_of(config: RunConfig) -> type[Task]:
    """Return the class of a config's task, whose data stay closed."""
    if config.data.kind == "synthetic":
        return SyntheticTask
    if config.data.kind == "pairs":
        return PairTask
    if config.data.kind == "labels":
        return LabelTask
    if config.data.kind == "masks":
        return SegmentationTask
    if config.data.kind == "documents":
        return ON_DOCUMENTS[config.model.kind]
    if config.data.kind == "points":
        return PartTask if config.model.kind == "point_segmenter" else PointClassTask
    if config.model.kind == "lm":
        return TextTask
    return ON_IMAGES.get(config.model.kind, ClassifyTask)


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
    if config.data.kind == "labels":
        return config.override({"model.classes": len(labels_of(config))})
    if config.data.kind == "points":
        return match_points(config)
    if config.data.kind == "masks":
        return match_mask_data(config)
    if config.data.kind != "images":
        return config
    return match_image_data(config)
