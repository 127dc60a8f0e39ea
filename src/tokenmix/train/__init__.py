"""Training: a config in, a run directory out. Any run can be stopped at any point and resumed bit for bit."""

from .config import OptimConfig, RunConfig, TrainConfig
from .data_config import DataConfig, ImageDataConfig, SyntheticDataConfig
from .evaluate import EvalResult, evaluate
from .init_from import load_model
from .loop import resume, train
from .runs import draw_run, evaluate_run, load_run, sample_run
from .tasks import match_data

__all__ = [
    "DataConfig",
    "EvalResult",
    "ImageDataConfig",
    "OptimConfig",
    "RunConfig",
    "SyntheticDataConfig",
    "TrainConfig",
    "draw_run",
    "evaluate",
    "evaluate_run",
    "load_model",
    "load_run",
    "match_data",
    "resume",
    "sample_run",
    "train",
]
