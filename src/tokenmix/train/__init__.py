"""Training: a config in, a run directory out. Any run can be stopped at any point and resumed bit for bit."""

from .config import DataConfig as DataConfig
from .config import ImageDataConfig as ImageDataConfig
from .config import OptimConfig as OptimConfig
from .config import RunConfig as RunConfig
from .config import TrainConfig as TrainConfig
from .evaluate import EvalResult as EvalResult
from .evaluate import evaluate as evaluate
from .init_from import load_model as load_model
from .loop import resume as resume
from .loop import train as train
from .runs import draw_run as draw_run
from .runs import evaluate_run as evaluate_run
from .runs import load_run as load_run
from .runs import sample_run as sample_run
from .tasks import match_data as match_data
