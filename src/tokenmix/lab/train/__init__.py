"""Training: a config in, a run directory out. Any run can be stopped at any point and resumed bit for bit."""

from ...models.saved import load_model
from .class_losses import CLASS_LOSSES, ClassLoss
from .config import OptimConfig, RunConfig, TrainConfig
from .data_config import (
    DataConfig,
    DocumentDataConfig,
    ImageDataConfig,
    LabelDataConfig,
    PairDataConfig,
    SyntheticDataConfig,
)
from .distill_mixers import DistillConfig, distill
from .evaluate import EvalResult, evaluate
from .mask_config import MaskDataConfig
from .mask_scores import MaskScore, confusion_matrix, intersection_over_union
from .point_data_config import PointsDataConfig
from .runs import classify_run, draw_run, evaluate_run, fill_run, generate_run, load_run, sample_run, translate_run
from .start import resume, train
from .tasks import match_data

__all__ = [
    "CLASS_LOSSES",
    "ClassLoss",
    "DataConfig",
    "DistillConfig",
    "DocumentDataConfig",
    "EvalResult",
    "ImageDataConfig",
    "LabelDataConfig",
    "MaskDataConfig",
    "MaskScore",
    "OptimConfig",
    "PairDataConfig",
    "PointsDataConfig",
    "RunConfig",
    "SyntheticDataConfig",
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
    "resume",
    "sample_run",
    "train",
    "translate_run",
]
