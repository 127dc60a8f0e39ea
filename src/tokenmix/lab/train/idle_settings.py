"""Settings of a run that have no effect, or less than their number says."""

from __future__ import annotations

from typing import Any

from ..data import CHARACTER_TASKS
from .config import ENDING, OptimConfig, RunConfig, TrainConfig

READ_BY = {
    "eval_bytes": ("text",),
    "stride": ("text",),
    "sample_bytes": ("text",),
    "eval_images": ("images", "masks"),
    "eval_texts": ("pairs", "documents", "labels"),
    "workers": ("images", "masks"),
    "samples": ("images", "masks", "documents", "pairs"),
}
"""Fields of train that only some kinds of data know."""

CHARACTERS = tuple(CHARACTER_TASKS)
READ_WITH = {
    ("images", "train.samples"): ("model.kind", ("image_density", "dit")),
    ("documents", "train.samples"): ("model.kind", ("lm",)),
    ("documents", "data.rate"): ("model.kind", ("encoder", "seq2seq")),
    ("documents", "data.whole_words"): ("model.kind", ("encoder",)),
    ("documents", "data.span"): ("model.kind", ("seq2seq",)),
    ("synthetic", "data.pairs"): ("data.task", ("recall",)),
    ("synthetic", "data.shortest"): ("data.task", CHARACTERS),
    ("synthetic", "data.longest"): ("data.task", CHARACTERS),
    ("synthetic", "data.symbols"): ("data.task", ("copy", "reverse", "selective_copy")),
}
"""By kind of data, fields that are only read with some values of another one."""


def idle_settings(config: RunConfig, ranks: int = 1) -> list[str]:
    """Describe the settings of a config that cannot do what they say, each in a few words.

    Args:
        ranks: processes that train together.
    """
    found = [*_of_steps(config), *_of_optim(config.optim), *_of_kind(config)]
    if ranks == 1 and config.train.shard == "fsdp":
        found.append("train.shard='fsdp' is only for several processes (torchrun)")
    return found


def _of_steps(config: RunConfig) -> list[str]:
    train, optim, steps = config.train, config.optim, config.train.steps
    if steps is None:
        return []
    found = []
    if optim.warmup > steps:
        found.append(
            f"optim.warmup={optim.warmup} is longer than train.steps={steps}, so the rate never reaches its top"
        )
    elif optim.schedule == "wsd" and round(steps * (1 - optim.decay)) < optim.warmup:
        found.append(f"optim.decay={optim.decay} begins inside of optim.warmup={optim.warmup}, and goes down after it")
    late = [
        f"train.{name}={getattr(train, name)}"
        for name in ("log_every", "eval_every", "save_every")
        if getattr(train, name) > steps and _is_set(train, TrainConfig(), name)
    ]
    if late:
        found.append(f"{' and '.join(late)} come{'s' * (len(late) == 1)} only at the end, after train.steps={steps}")
    most = (1 + steps) / (10 + steps)  # see ``optim.Average``
    if optim.ema > most:
        found.append(
            f"optim.ema={optim.ema} is not reached in train.steps={steps}: averages decay by {most:.3g} at most"
        )
    return found


def _of_optim(optim: OptimConfig) -> list[str]:
    usual, found = OptimConfig(), []
    for name, used, where in (
        ("muon_lr", optim.name == "muon", "optim.name='muon'"),
        ("decay", optim.schedule == "wsd", "optim.schedule='wsd'"),
        ("min_lr_ratio", optim.schedule in ENDING, f"optim.schedule in {', '.join(ENDING)}"),
    ):
        if not used and _is_set(optim, usual, name):
            found.append(f"optim.{name}={getattr(optim, name)} is only for {where}")
    return found


def _of_kind(config: RunConfig) -> list[str]:
    train, usual, kind = config.train, TrainConfig(), config.data.kind
    found = [
        f"train.{name}={getattr(train, name)} is only for data of kind {' or '.join(kinds)}"
        for name, kinds in READ_BY.items()
        if kind not in kinds and _is_set(train, usual, name)
    ]
    for (of, field), (other, values) in READ_WITH.items():
        (part, name), (where, which) = field.split("."), other.split(".")
        given: Any = getattr(config, part)
        if of == kind and getattr(getattr(config, where), which) not in values and _is_set(given, type(given)(), name):
            found.append(f"{field}={getattr(given, name)!r} is only for {other} {' or '.join(values)}")
    if train.teacher is None and _is_set(train, usual, "distill"):
        found.append(f"train.distill={train.distill} is only for train.teacher")
    return found


def _is_set(config: Any, usual: Any, name: str) -> bool:
    return bool(getattr(config, name) != getattr(usual, name))
