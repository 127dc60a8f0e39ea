"""Settings of a run that have no effect, or less than their number says."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .config import ENDING, OptimConfig, RunConfig, TrainConfig
from .registry import all_tasks, find_task

OF_OPTIMIZER = ("name", "lr", "muon_lr", "betas", "eps", "weight_decay", "layer_decay", "mixer_lr")
"""Fields of ``optim`` that an optimiser of one's own does not read."""


def idle_settings(config: RunConfig, ranks: int = 1) -> list[str]:
    """Describe the settings of a config that cannot do what they say, each in a few words.

    Args:
        ranks: processes that train together.
    """
    found = [*_of_steps(config), *_of_optim(config), *_of_task(config)]
    if ranks == 1 and config.train.shard == "fsdp":
        found.append("train.shard='fsdp' is only for several processes (torchrun)")
    return found


def _of_steps(config: RunConfig) -> list[str]:
    train, optim, steps = config.train, config.optim, config.train.steps
    if steps is None:
        return []
    found = []
    if "schedule" in config.own or optim.schedule == "onecycle":  # which have no warm-up
        pass
    elif optim.warmup > steps:
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


def _of_optim(config: RunConfig) -> list[str]:
    optim, usual, found = config.optim, OptimConfig(), []
    falling = [name for name in ENDING if name != "onecycle"]
    for part, names in (("optimizer", OF_OPTIMIZER), ("schedule", ("schedule", "warmup", "decay", "min_lr_ratio"))):
        set_by_hand = [f"optim.{name}={getattr(optim, name)}" for name in names if _is_set(optim, usual, name)]
        if part in config.own and set_by_hand:
            found.append(f"{' and '.join(set_by_hand)} beside {part}= of its own")
    for name, used, where in (
        ("muon_lr", optim.name == "muon", "optim.name='muon'"),
        ("decay", optim.schedule == "wsd", "optim.schedule='wsd'"),
        ("min_lr_ratio", optim.schedule in falling, f"optim.schedule in {', '.join(falling)}"),
        ("warmup", optim.schedule != "onecycle", "the other values of optim.schedule than 'onecycle'"),
    ):
        if not used and _is_set(optim, usual, name):
            found.append(f"optim.{name}={getattr(optim, name)} is only for {where}")
    return found


def _of_task(config: RunConfig) -> list[str]:
    train, usual, task, found = config.train, TrainConfig(), find_task(config.data, config.model), []
    for name in (field.name for field in fields(train)):
        kinds = dict.fromkeys(each.config.kind for each in all_tasks() if name in each.reads)
        if kinds and name not in task.reads and _is_set(train, usual, name):
            found.append(f"train.{name}={getattr(train, name)} is only for data of kind {' or '.join(kinds)}")
    for field, (other, values) in task.reads_with.items():
        (part, name), (where, which) = field.split("."), other.split(".")
        given: Any = getattr(config, part)
        if getattr(getattr(config, where), which) not in values and _is_set(given, type(given)(), name):
            found.append(f"{field}={getattr(given, name)!r} is only for {other} {' or '.join(values)}")
    if train.teacher is None and _is_set(train, usual, "distill"):
        found.append(f"train.distill={train.distill} is only for train.teacher")
    return found


def _is_set(config: object, usual: object, name: str) -> bool:
    return bool(getattr(config, name) != getattr(usual, name))
