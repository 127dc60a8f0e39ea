"""A run as JSON: everything needed to do it again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..data.augment import Augment
from ..data.bounds import MAX_PIXELS
from ..errors import MixerError
from ..models import ModelConfig
from ..system.config import Json, nearest, to_json

SCHEDULES = ("vaswani", "cosine", "linear", "constant")
PRECISIONS = ("fp32", "bf16")
FIXED = ("seed", "batch_size", "precision", "distill")  # of train: what may not change in the middle of a run
MOVABLE = ("source", "path", "max_unpacked", "max_pixels")  # of data: the bytes are held against their sha256, wherever they lie now
MOST_THREADS = 1024
SEEDS = -(1 << 63), (1 << 64) - 1  # what torch's generators take


@dataclass(frozen=True)
class DataConfig(Json):
    """The corpus: a name or path, an optional local copy of enwik8, proportions of the splits, bytes per training sequence, and how many bytes an archive
    may unpack to (``data.Bounds``)."""

    source: str = "stdlib"
    path: str | None = None
    split: tuple[float, ...] | None = None
    seq_len: int = 256
    max_unpacked: int | None = None
    kind: str = "text"


@dataclass(frozen=True)
class ImageDataConfig(Json):
    """The images: a set's name or a path, an optional local copy of the set, how much of train is held out where the set has no validation split.

    Args:
        augment: what happens to training images; for a density model only ``flip`` and ``shift``.
        smoothing: of the labels.
        mean, std: pixels in 0..1 are normalised with these, one per channel; None: those of ImageNet, for grey images 0.5.
        skip_bad_files: leave out files that are no images, with a warning, instead of refusing the set.
        max_unpacked, max_pixels: bounds on what an archive unpacks to, and on an image file (``data.Bounds``).
    """

    source: str = "digits"
    path: str | None = None
    valid: float | None = None
    augment: Augment = field(default_factory=Augment)
    smoothing: float = 0.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    skip_bad_files: bool = False
    max_unpacked: int | None = None
    max_pixels: int = MAX_PIXELS
    kind: str = "images"


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule; weight decay acts on the weights of linear layers and convolutions only, ``clip`` on the norm of the whole gradient (0: off).

    Args:
        aux_weight: the mixers' auxiliary losses, where they have any, are added to the loss times this.
        layer_decay: each layer below the head learns at this fraction of the rate of the layer above it.
        mixer_lr: what mixers own beside linear layers, convolutions and norms (position biases, tables, filters, memories) learns at this multiple of the rate.
        ema: decay of an average of the weights, which is evaluated in their place (0: none).
        one_hot: weight of the penalty that drives each head's AFT-conv filter to a single tap.
    """

    lr: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    schedule: str = "cosine"
    warmup: int = 100
    min_lr_ratio: float = 0.1
    clip: float = 1.0
    aux_weight: float = 0.01
    layer_decay: float = 1.0
    mixer_lr: float = 1.0
    ema: float = 0.0
    one_hot: float = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """The loop. A run ends after ``steps`` or after ``max_seconds`` of training time, evaluation and checkpoints not counted, whichever is first.

    Args:
        batch_size: sequences per step, processed in ``accumulate`` equal parts.
        eval_bytes: evaluate on the first so many bytes of the validation split; None: all of it.
        stride: of the evaluation windows; default half of seq_len.
        keep: how many of the latest checkpoints stay; the best always does.
        sample_bytes: length of the sample written at each evaluation; 0: none.
        threads: of torch on the CPU; None: torch's choice.
        eval_images: evaluate on the first so many images of the validation split; None: all of it.
        workers: processes that prepare batches of images ahead; 0: none.
        samples: images a density model draws at each evaluation.
        init: a directory with weights to start from: a run, or what ``tokenmix convert`` wrote.
        teacher: such a directory, whose model the layers learn to imitate; ``distill`` weighs that loss.
    """

    steps: int | None = 1000
    max_seconds: float | None = None
    batch_size: int = 16
    accumulate: int = 1
    seed: int = 0
    device: str = "auto"
    precision: str = "fp32"
    compile: bool = False
    threads: int | None = None
    log_every: int = 10
    eval_every: int = 200
    eval_bytes: int | None = None
    eval_batch: int = 16
    stride: int | None = None
    save_every: int = 200
    keep: int = 2
    sample_bytes: int = 0
    eval_images: int | None = None
    workers: int = 0
    samples: int = 0
    init: str | None = None
    teacher: str | None = None
    distill: float = 1.0


@dataclass(frozen=True)
class RunConfig(Json):
    """Model, data, optimiser and loop, with the recipe they came from."""

    model: ModelConfig
    data: DataConfig | ImageDataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    recipe: str = ""
    row: str = ""
    size: str = ""

    def __post_init__(self) -> None:
        _check_optim(self.optim)
        _check_train(self.train)
        if self.train.steps is None and self.train.max_seconds is None:
            raise MixerError("config: nothing ends this run; set train.steps or train.max_seconds.")
        if self.train.steps is None and self.optim.schedule in ("cosine", "linear"):
            raise MixerError(f"config: optim.schedule={self.optim.schedule!r} needs train.steps; without it choose 'vaswani' or 'constant'.")
        wanted = "text" if self.model.kind == "lm" else "images"
        if self.data.kind != wanted:
            raise MixerError(f"config: a model of kind {self.model.kind!r} is trained on data of kind {wanted!r}, got {self.data.kind!r}.")
        if isinstance(self.data, DataConfig):
            _check_text(self.data.seq_len, self.model, self.train.stride)
        else:
            _check_images(self.data)

    def override(self, changes: dict[str, Any]) -> RunConfig:
        """The config with dotted fields replaced: ``{"model.dim": 64, "train.steps": 100}``."""
        data = self.to_json()
        for dotted, value in changes.items():
            *parents, last = dotted.split(".")
            node: Any = data
            for i, name in enumerate([*parents, last]):
                if not isinstance(node, dict) or name not in node:
                    known = known_fields(self.to_json())
                    raise MixerError(f"config: there is no field {'.'.join([*parents, last][: i + 1])!r}; {nearest(dotted, known)}.")
                if name is not last or i < len(parents):
                    node = node[name]
            node[last] = to_json(value)
        return RunConfig.from_json(data)


def known_fields(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every dotted field of a config's JSON, with its value."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= known_fields(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def fixed_fields(config: RunConfig) -> dict[str, Any]:
    """The dotted fields that may not change in the middle of a run, with their values."""
    data = config.to_json()
    parts = {"model": data["model"], "data": {k: v for k, v in data["data"].items() if k not in MOVABLE}, "optim": data["optim"]}
    return known_fields(parts | {"train": {name: data["train"][name] for name in FIXED}})


def check_unchanged(config: RunConfig, then: dict[str, Any] | None, where: Any) -> None:
    """Refuse a config whose fixed fields are not those a checkpoint was written with; older checkpoints do not say (None)."""
    now = fixed_fields(config)
    changed = [f"{name} was {was!r}, is {now.get(name)!r}" for name, was in (then or {}).items() if now.get(name) != was]
    if changed:
        raise MixerError(f"{where} was edited since the checkpoint was written: {'; '.join(changed)}; put it back, or start a new run.")


def check_seed(seed: int | None, name: str = "seed") -> None:
    """Refuse a seed that torch's generators do not take."""
    if seed is not None and not SEEDS[0] <= seed <= SEEDS[1]:
        raise MixerError(f"{name}={seed} is out of range; a seed is a whole number from -2^63 to 2^64 - 1.")


def parse_value(text: str) -> Any:
    """A value typed on the command line: JSON where it parses, else the text itself; ``none`` is null."""
    if text.lower() in ("none", "null"):
        return None
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text.replace("_", "") if text.replace("_", "").isdigit() else text)
    except json.JSONDecodeError:
        return text


def _positive(section: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise MixerError(f"config: {section}.{name} must be positive, got {value}.")


def _check_optim(config: OptimConfig) -> None:
    _positive("optim", config, "lr", "eps", "mixer_lr")
    if config.schedule not in SCHEDULES:
        raise MixerError(f"config: optim.schedule={config.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}.")
    if len(config.betas) != 2 or not all(0 <= b < 1 for b in config.betas):
        raise MixerError(f"config: optim.betas must be two numbers in [0, 1), got {list(config.betas)}.")
    if not 0 < config.layer_decay <= 1 or not 0 <= config.ema < 1:
        raise MixerError(f"config: optim.layer_decay must be in (0, 1] and optim.ema in [0, 1), got {config.layer_decay} and {config.ema}.")
    for name in ("weight_decay", "warmup", "clip", "min_lr_ratio", "aux_weight", "one_hot"):
        if getattr(config, name) < 0:
            raise MixerError(f"config: optim.{name} must be >= 0, got {getattr(config, name)}.")


def _check_train(config: TrainConfig) -> None:
    _positive(
        "train",
        config,
        "steps",
        "max_seconds",
        "batch_size",
        "accumulate",
        "threads",
        "log_every",
        "eval_every",
        "eval_batch",
        "save_every",
        "keep",
        "eval_images",
    )
    check_seed(config.seed, "config: train.seed")
    if config.threads is not None and config.threads > MOST_THREADS:
        raise MixerError(f"config: train.threads must be at most {MOST_THREADS}, got {config.threads}.")
    if config.batch_size % config.accumulate:
        raise MixerError(f"config: train.accumulate={config.accumulate} must divide train.batch_size={config.batch_size}.")
    if config.precision not in PRECISIONS:
        raise MixerError(f"config: train.precision={config.precision!r} is unknown; choose one of {', '.join(PRECISIONS)}.")
    if config.eval_bytes is not None and config.eval_bytes < 2:
        raise MixerError(f"config: train.eval_bytes must be at least 2, got {config.eval_bytes}.")
    for name in ("sample_bytes", "samples", "workers", "distill"):
        if getattr(config, name) < 0:
            raise MixerError(f"config: train.{name} must be >= 0, got {getattr(config, name)}.")


def _check_text(seq_len: int, model: Any, stride: int | None) -> None:
    if not 1 <= seq_len <= model.max_len:
        raise MixerError(f"config: data.seq_len must be in 1..model.max_len={model.max_len}, got {seq_len}.")
    if stride is not None and not 1 <= stride <= seq_len:
        raise MixerError(f"config: train.stride must be in 1..data.seq_len={seq_len}, got {stride}.")


def _check_images(data: ImageDataConfig) -> None:
    if not 0 <= data.smoothing < 1:
        raise MixerError(f"config: data.smoothing must be in [0, 1), got {data.smoothing}.")
    if data.valid is not None and data.valid <= 0:
        raise MixerError(f"config: data.valid must be a positive fraction or number of images, got {data.valid}.")
