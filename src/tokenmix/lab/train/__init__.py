"""Training: a config in, a run directory out. Any run can be stopped at any point and resumed bit for bit."""

import sys
from types import ModuleType
from typing import Any

from ...models.saved import load_model
from .class_losses import CLASS_LOSSES, ClassLoss
from .config import OptimConfig, RunConfig, TrainConfig
from .constant import Constant
from .distill_mixers import DistillConfig, distill
from .document_task import DocumentDataConfig
from .evaluate import EvalResult, evaluate
from .image_data_config import ImageDataConfig
from .label_task import LabelDataConfig
from .mask_scores import MaskScore, confusion_matrix, intersection_over_union
from .own import OwnData, Parts
from .pair_task import PairDataConfig
from .point_task import PointsDataConfig
from .registry import OwnModel, TaskData, register_task
from .run import Run
from .runs import classify_run, draw_run, evaluate_run, fill_run, generate_run, load_run, sample_run, translate_run
from .segmentation_task import MaskDataConfig
from .start import resume, train
from .synthetic_task import SyntheticDataConfig
from .task import Score, Task
from .tasks import match_data
from .text_task import DataConfig

__all__ = [
    "CLASS_LOSSES",
    "ClassLoss",
    "Constant",
    "DataConfig",
    "DistillConfig",
    "DocumentDataConfig",
    "EvalResult",
    "ImageDataConfig",
    "LabelDataConfig",
    "MaskDataConfig",
    "MaskScore",
    "OptimConfig",
    "OwnData",
    "OwnModel",
    "PairDataConfig",
    "Parts",
    "PointsDataConfig",
    "Run",
    "RunConfig",
    "Score",
    "SyntheticDataConfig",
    "Task",
    "TaskData",
    "TrainConfig",
    "classify_run",
    "confusion_matrix",
    "distill",
    "draw_run",
    "evaluate",
    "evaluate_run",
    "fill_run",
    "generate_run",
    "intersection_over_union",
    "load_model",
    "load_run",
    "match_data",
    "register_task",
    "resume",
    "sample_run",
    "train",
    "translate_run",
]


class _Callable(ModuleType):
    """This module, which can be called as its function: ``tokenmix.lab.train(config, out)``."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return train(*args, **options)


sys.modules[__name__].__class__ = _Callable
