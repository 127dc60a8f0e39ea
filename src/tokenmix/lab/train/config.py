"""The config of a training run as JSON: everything needed to repeat the run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import MixerError
from ...models import ModelConfig, check_layers
from ...models.saved import check_fields
from ...system.config import Json, check_types, dotted_fields, nearest, to_json, without_removed
from ...system.text import whole_number
from ...types import Options, Record
from .registry import OwnModel, TaskData, default_data, find_task

OPTIMIZERS = ("adamw", "muon", "sgd")
SCHEDULES = ("vaswani", "cosine", "linear", "poly", "wsd", "onecycle", "constant")
ENDING = ("cosine", "linear", "poly", "wsd", "onecycle")  # schedules that need the number of steps
PRECISIONS = ("fp32", "bf16", "fp16")
# Fields of train that may not change in the middle of a run.
FIXED = ("seed", "batch_size", "precision", "distill")
MOST_THREADS = 1024
MOST = {"threads": MOST_THREADS, "workers": MOST_THREADS, "batch_size": 2**24}  # more fits into no machine
MEANT = {
    name: field
    for field, names in {
        "optim.lr": "learning_rate max_lr",
        "optim.name": "optim optimizer optimiser",
        "optim.schedule": "scheduler lr_scheduler lr_scheduler_type",
        "optim.warmup": "warmup_steps warmup_iters",
        "optim.min_lr_ratio": "min_lr",
        "optim.betas": "momentum beta1 beta2",
        "optim.clip": "grad_clip max_grad_norm gradient_clip_val",
        "train.steps": "max_steps max_iters epochs max_epochs num_train_epochs",
        "train.batch_size": "per_device_train_batch_size",
        "train.accumulate": "gradient_accumulation_steps accumulate_grad_batches",
        "train.precision": "dtype fp16 bf16 amp mixed_precision",
        "train.eval_every": "eval_interval eval_steps",
        "train.log_every": "log_interval logging_steps",
        "train.save_every": "save_steps",
        "data.seq_len": "block_size context_length",
        "model.layers": "depth n_layer n_layers num_layers",
        "model.dim": "n_embd d_model hidden_size width",
        "model.mixers.0.heads": "heads n_head n_heads num_heads",
    }.items()
    for name in names.split()
}
"""Names of other trainers, and the fields that they have here."""
SEEDS = -(1 << 63), (1 << 64) - 1  # the range that torch's generators accept


@dataclass(frozen=True)
class OptimConfig:
    """Optimiser and schedule. Weight decay acts only on the weights of linear layers and convolutions.

    Args:
        name: "adamw"; "muon": Muon for the weights of linear layers inside blocks, AdamW for everything else; or "sgd",
            with Nesterov momentum. Any other is an argument of ``train``.
        lr: highest learning rate of AdamW or SGD, above 0.
        muon_lr: highest learning rate of Muon, above 0; it follows the same schedule.
        betas: AdamW's two decay rates of the gradient's moments, each in [0, 1); the first is SGD's momentum.
        eps: AdamW's term in the denominator, above 0.
        weight_decay: decoupled weight decay, 0 or more; SGD adds it to the gradient.
        schedule: "cosine", "linear" or "poly" (down to ``min_lr_ratio * lr`` at the last step; "poly" by the power 0.9
            of what is left), "wsd" (constant, then linear down to that over the last ``decay`` of the steps),
            "constant", or "vaswani" (inverse square root), each after a linear warm-up; or "onecycle", up from lr / 25
            over the first 30 % of the steps and down to almost 0. All but "constant" and "vaswani" need ``steps``.
        warmup: steps of linear warm-up, 0 or more.
        decay: share of the steps in which "wsd" goes down, in (0, 1].
        min_lr_ratio: last learning rate of "cosine", "linear", "poly" and "wsd" as a multiple of ``lr``, 0 or more.
        clip: largest L2 norm of the whole gradient, which is scaled down to it; 0: no clipping.
        aux_weight: weight of the mixers' auxiliary losses, where they have any, in the total loss; 0: they are not
            added.
        layer_decay: learning rate of each layer as a fraction of that of the layer above it, in (0, 1]; 1: the same
            rate everywhere.
        mixer_lr: learning rate, as a multiple of ``lr`` above 0, of the parameters that mixers have beside linear
            layers, convolutions and norms (position biases, tables, filters, memories).
        ema: decay of an exponential moving average of the weights, in [0, 1), which is evaluated in their place; 0: no
            average.
        one_hot: weight, 0 or more, of the penalty that drives each head's AFT-conv filter to a single tap; 0: none.
    """

    name: str = "adamw"
    lr: float = 1e-3
    muon_lr: float = 0.02
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    schedule: str = "cosine"
    warmup: int = 100
    decay: float = 0.2
    min_lr_ratio: float = 0.1
    clip: float = 1.0
    aux_weight: float = 0.01
    layer_decay: float = 1.0
    mixer_lr: float = 1.0
    ema: float = 0.0
    one_hot: float = 0.0

    def __post_init__(self) -> None:
        check_types(self, "optim")
        _check_optim(self)


@dataclass(frozen=True)
class TrainConfig:
    """The training loop, which ends after ``steps`` or ``max_seconds``, whichever comes first; give at least one.

    All counts must be at least 1 unless stated otherwise.

    Args:
        steps: number of updates; None: no limit.
        max_seconds: seconds of training time, not counting evaluation and checkpoints; None: no limit.
        batch_size: sequences or images per step, at most 2^24.
        accumulate: equal parts in which a batch is processed to save memory; must divide ``batch_size``.
        seed: seed of initialisation and batches, from -2^63 to 2^64 - 1.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1" and so on; with "auto" and "cuda", each of
            several processes takes a GPU of its own.
        precision: "fp32", "bf16" for autocast to bfloat16, or "fp16" for autocast to float16 with a scaled loss.
        compile: whether to run the model through ``torch.compile``.
        threads: CPU threads of torch, at most 1024; None: torch's own choice.
        log_every: steps between lines of training metrics.
        eval_every: steps between evaluations on the validation split.
        eval_bytes: number of leading bytes of the validation text to evaluate on, at least 2; None: all of it.
        eval_batch: windows or images per evaluation batch.
        stride: bytes that evaluation windows advance by, from 1 to ``seq_len``; None: half of ``seq_len``.
        save_every: steps between checkpoints.
        keep: number of latest checkpoints to keep; the best one is always kept as well.
        sample_bytes: length in bytes of the text sampled at each evaluation; 0: none.
        eval_images: number of leading validation images to evaluate on; None: all of them.
        eval_texts: number of leading validation pairs, documents or labelled texts to evaluate on; None: all of them.
        workers: processes that prepare image batches ahead; 0: none.
        samples: number of images that a density model or a diffusion transformer draws, of masks that a segmentation
            model predicts, or of texts that a language model of subwords or an encoder-decoder of pairs writes, at each
            evaluation; 0: none.
        init: directory with initial weights, either a run or the output of ``tokenmix convert``; None: random weights.
        teacher: such a directory, whose model the layers learn to imitate; None: no distillation.
        distill: weight of the distillation loss, 0 or more; only used with ``teacher``.
        csv: keep the metrics as a table too, in metrics.csv.
        tensorboard: write metrics and samples for TensorBoard too, into the folder tensorboard of the run.
        shard: on several processes, none (each holds all weights) or "fsdp" (each holds a part; language models).
        context_parallel: on several processes, how many of them share the tokens of a sequence; must divide their
            number.
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
    eval_texts: int | None = None
    workers: int = 0
    samples: int = 0
    init: str | None = None
    teacher: str | None = None
    distill: float = 1.0
    csv: bool = False
    tensorboard: bool = False
    shard: str | None = None
    context_parallel: int = 1

    def __post_init__(self) -> None:
        check_types(self, "train")
        _check_train(self)


@dataclass(frozen=True)
class RunConfig(Json):
    """Model, data, optimiser and loop of a run, and the recipe they come from.

    Args:
        model: config of the model, of the class that its ``kind`` names.
        data: config of the data, whose kind is one that a task trains the model on (``register_task``): text, synthetic
            sequences or documents for a language model, pairs of texts or documents for an encoder-decoder, documents
            or labelled texts for an encoder, images with masks for a segmentation model, point clouds for their
            classifier and their segmenter, images for the others, or a kind of your own.
        optim: optimiser and schedule.
        train: loop, evaluation and checkpoints.
        recipe: name of the recipe; "" for a config of your own.
        row: row of the recipe.
        size: size of the row: "smoke", "gpu" or "paper".
        own: the parts that ``train`` was given as objects: for each the name to import, or None, and a fingerprint.
    """

    model: ModelConfig | OwnModel
    data: TaskData = field(default_factory=default_data)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    recipe: str = ""
    row: str = ""
    size: str = ""
    own: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.train.steps is None and self.train.max_seconds is None:
            raise MixerError("config: this run would never end; set train.steps or train.max_seconds.")
        if self.train.steps is None and self.optim.schedule in ENDING:
            raise MixerError(
                f"config: optim.schedule={self.optim.schedule!r} needs train.steps; "
                + "without it choose 'vaswani' or 'constant'."
            )
        check_layers(getattr(self.model, "backbone", self.model))
        find_task(self.data, self.model).check(self)

    def override(self, changes: Options) -> RunConfig:
        """Return the config with dotted fields replaced: ``{"model.dim": 64, "model.mixers.0.window": 32}``.

        A mixer without options may be given by its bare name, and a list of them with commas.
        """
        data = self.to_json()
        for dotted, value in changes.items():
            _set_field(data, dotted, _specs_of(dotted, to_json(value)))
        return RunConfig.from_json(data)


def _specs_of(dotted: str, value: Any) -> Any:
    """Return the specs of mixers that bare names stand for; other values, and those of other fields, as they are."""
    if re.fullmatch(r"(.*\.)?mixers\.\d+", dotted) and isinstance(value, str):
        return {"name": value}
    if dotted.split(".")[-1] != "mixers":
        return value
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    return [{"name": each} if isinstance(each, str) else each for each in names] if isinstance(names, list) else value


def _set_field(data: Record, dotted: str, value: object) -> None:
    """Set a dotted field of a config's JSON. A part that is a number counts in a list, whose objects take any field."""
    names = dotted.split(".")
    node: Any = data
    in_list = False
    for i, name in enumerate(names):
        key: str | int = name
        last = i == len(names) - 1
        if isinstance(node, list):
            key, in_list = _place(node, name, ".".join(names[:i])), True
        elif not isinstance(node, dict) or (name not in node and not (in_list and last)):
            meant = MEANT.get(names[-1].replace("-", "_"))
            near = f"did you mean {meant}?" if meant else nearest(dotted, dotted_fields(data)) + "."
            raise MixerError(f"config: there is no field {'.'.join(names[: i + 1])!r}; {near}")
        if last:
            node[key] = value
        else:
            node = node[key]


def _place(items: list[object], name: str, where: str) -> int:
    """Return the place in a list that a part of a dotted name gives."""
    place = whole_number(name)
    if place is not None and place < len(items):
        return place
    last = len(items) - 1
    known = "is empty" if last < 0 else f"has only {where}.0" + (f" to {where}.{last}" if last else "")
    raise MixerError(f"config: there is no field '{where}.{name}'; {where} {known}.")


def fixed_fields(config: RunConfig) -> Record:
    """Return the dotted fields that may not change in the middle of a run, with their values."""
    data, movable = config.to_json(), find_task(config.data, config.model).movable
    parts = {
        "model": data["model"],
        "data": {k: v for k, v in data["data"].items() if k not in movable},
        "optim": data["optim"],
    }
    return dotted_fields(parts | {"train": {name: data["train"][name] for name in FIXED}})


def check_unchanged(config: RunConfig, then: Record | None, where: Path) -> None:
    """Refuse a config whose fixed fields differ from those a checkpoint was written with.

    Old checkpoints do not record them (``then`` is None) and are not checked.
    """
    check_fields(without_removed(config, then or {}), fixed_fields(config), where)


def check_seed(seed: int | None, name: str = "seed") -> None:
    """Refuse a seed that torch's generators do not accept."""
    if seed is not None and not SEEDS[0] <= seed <= SEEDS[1]:
        raise MixerError(f"{name}={seed} is out of range; a seed is an integer from -2^63 to 2^64 - 1.")


def parse_value(text: str) -> object:
    """Parse a value typed on the command line: as JSON where possible, else as text; ``none`` means null."""
    if text.lower() in ("none", "null"):
        return None
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text.replace("_", "") if text.replace("_", "").isdigit() else text)
    except (ValueError, RecursionError):  # also for more digits than Python reads
        return text


def _require_positive(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise MixerError(f"config: {section}.{name} must be positive, got {value}.")


def _check_optim(config: OptimConfig) -> None:
    _require_positive("optim", config, "lr", "muon_lr", "eps", "mixer_lr")
    if config.name not in OPTIMIZERS:
        raise MixerError(
            f"config: optim.name={config.name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}, or give any other "
            + "in Python: tokenmix.lab.train(config, out, optimizer=...)."
        )
    if not 0 < config.decay <= 1:
        raise MixerError(f"config: optim.decay must be in (0, 1], got {config.decay}.")
    if config.schedule not in SCHEDULES:
        raise MixerError(
            f"config: optim.schedule={config.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}."
        )
    if len(config.betas) != 2 or not all(0 <= b < 1 for b in config.betas):
        raise MixerError(f"config: optim.betas must be two numbers in [0, 1), got {list(config.betas)}.")
    if not 0 < config.layer_decay <= 1 or not 0 <= config.ema < 1:
        raise MixerError(
            f"config: optim.layer_decay must be in (0, 1] and optim.ema in [0, 1), got {config.layer_decay} and "
            + f"{config.ema}."
        )
    for name in ("weight_decay", "warmup", "clip", "min_lr_ratio", "aux_weight", "one_hot"):
        if getattr(config, name) < 0:
            raise MixerError(f"config: optim.{name} must be >= 0, got {getattr(config, name)}.")


def _check_train(config: TrainConfig) -> None:
    _require_positive(
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
        "eval_texts",
        "context_parallel",
    )
    check_seed(config.seed, "config: train.seed")
    for name, most in MOST.items():
        if (getattr(config, name) or 0) > most:
            raise MixerError(f"config: train.{name} must be at most {most}, got {getattr(config, name)}.")
    if config.batch_size % config.accumulate:
        raise MixerError(
            f"config: train.accumulate={config.accumulate} must divide train.batch_size={config.batch_size}."
        )
    if config.precision not in PRECISIONS:
        raise MixerError(
            f"config: train.precision={config.precision!r} is unknown; choose one of {', '.join(PRECISIONS)}."
        )
    if config.shard not in (None, "none", "fsdp"):  # "none" stands in the config of older runs
        raise MixerError(f"config: train.shard={config.shard!r} is unknown; choose none or fsdp.")
    if config.eval_bytes is not None and config.eval_bytes < 2:
        raise MixerError(f"config: train.eval_bytes must be at least 2, got {config.eval_bytes}.")
    for name in ("sample_bytes", "samples", "workers", "distill"):
        if getattr(config, name) < 0:
            raise MixerError(f"config: train.{name} must be >= 0, got {getattr(config, name)}.")
