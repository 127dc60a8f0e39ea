"""Models in folders: run directories, which training leaves, and those of ``save_pretrained``, ``tokenmix convert``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..errors import MixerError
from ..system.checkpoint import list_steps, load_checkpoint
from ..system.config import dotted_fields, without_removed
from ..system.files import read_json
from ..types import Record
from . import KINDS, build_model, config_from_json
from .model import CONFIG, WEIGHTS, Model, load_weights


def load_model(path: Path | str) -> tuple[Model, Any]:
    """Load a model and its config from a run directory or the folder of a saved or converted model, in eval mode.

    Of a run the last checkpoint is loaded, with averaged weights if it averages them.
    """
    folder = Path(path)
    if (folder / "checkpoints").is_dir():
        config, tensors, _ = read_run(folder)
        with torch.random.fork_rng():
            model: Model = build_model(config)
        load_weights(model, tensors, folder)
        return model.eval(), config
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise MixerError(
            f"{folder} contains no model; it must be a run directory, or have config.json and {WEIGHTS} as written by "
            + "`tokenmix convert`."
        )
    given = read_json(folder / CONFIG)
    if given.get("kind") == "surgery":
        host = "holds a host whose attention was replaced, not a model of tokenmix"
        raise MixerError(f"{folder} {host}; tokenmix.hosts.load_converted opens it.")
    config = config_from_json(given)
    return KINDS[config.kind][1].from_pretrained(folder), config


def read_run(folder: Path, step: int | str = "last") -> tuple[Any, dict[str, Tensor], int]:
    """Read a run directory's config of the model, its weights at a checkpoint, and that checkpoint's step.

    Raises:
        MixerError: if the checkpoint is damaged, or was written with another config of the model.
    """
    given = read_json(folder / "config.json")
    if "model" in given.get("own", {}):
        raise MixerError(f"{folder}: its model is not one of tokenmix; tokenmix.lab.train.load_run opens it.")
    config = config_from_json(given.get("model"))
    chosen = pick_step(folder, step)
    tensors, progress = read_weights_of(folder, chosen, averaged=bool(given.get("optim", {}).get("ema")))
    then = {name: was for name, was in (progress.get("config") or {}).items() if name.startswith("model.")}
    then = without_removed(SimpleNamespace(model=config), then)
    check_fields(then, dotted_fields({"model": config.to_json()}), folder / "config.json")
    return config, tensors, chosen


def read_weights_of(folder: Path, step: int, *, averaged: bool) -> tuple[dict[str, Tensor], Record]:
    """Read the weights of a run's checkpoint, or their average over time, and the run's counters."""
    group = "ema" if averaged else "model"
    tensors, progress = load_checkpoint(folder / "checkpoints", step, group)
    return tensors[group], progress


def pick_step(folder: Path, step: int | str = "last") -> int:
    """Return the step of a run directory's checkpoint given by a number, "last" or "best"."""
    checkpoints = folder / "checkpoints"
    steps = list_steps(checkpoints)
    if not steps:
        raise MixerError(f"{folder} has no checkpoint yet; `tokenmix resume {folder}` starts it again.")
    if step == "last":
        return steps[-1]
    if step == "best":
        _, progress = load_checkpoint(checkpoints, steps[-1])
        return steps[-1] if progress["best_step"] is None else progress["best_step"]
    try:
        return int(step)
    except ValueError:
        raise MixerError(f"step must be a number, 'last' or 'best', got {step!r}.") from None


def check_fields(then: Record, now: Record, where: Path) -> None:
    """Refuse fields of a config that differ from those a checkpoint was written with.

    Args:
        then, now: values by dotted name.
        where: the file of the config.
    """
    changed = [f"{name} was {was!r}, is {now.get(name)!r}" for name, was in then.items() if now.get(name) != was]
    if changed:
        raise MixerError(
            f"{where} was edited since the checkpoint was written: {'; '.join(changed)}; "
            + "restore it, or start a new run."
        )
