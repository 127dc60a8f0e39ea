"""Models in folders: run directories, which training leaves, and folders that ``tokenmix convert`` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..system.checkpoint import check_can_save, list_steps, load_checkpoint
from ..system.config import dotted_fields, without_removed
from ..types import Record
from . import build_model, config_from_json

WEIGHTS = "model.safetensors"


def load_model(path: Path | str) -> tuple[nn.Module, Any]:
    """Load a model and its config from a run directory (its last checkpoint) or a converted one, in eval mode.

    Of a run that averages its weights, the average is loaded.
    """
    folder = Path(path)
    if (folder / "checkpoints").is_dir():
        config, tensors, _ = read_run(folder)
        return _build_saved(config, tensors, folder), config
    if not (folder / "config.json").is_file() or not (folder / WEIGHTS).is_file():
        raise MixerError(
            f"{folder} contains no model; it must be a run directory, or have config.json and {WEIGHTS} as written by "
            + "`tokenmix convert`."
        )
    check_can_save()
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = config_from_json(_read_json(folder / "config.json"))
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as why:
        raise MixerError(f"{folder / WEIGHTS}: is truncated or not a safetensors file ({why}).") from None
    return _build_saved(config, tensors, folder), config


def read_run(folder: Path, step: int | str = "last") -> tuple[Any, dict[str, Tensor], int]:
    """Read a run directory's config of the model, its weights at a checkpoint, and that checkpoint's step.

    Raises:
        MixerError: if the checkpoint is damaged, or was written with another config of the model.
    """
    given = _read_json(folder / "config.json")
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


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Load weights into a model, which they must fit exactly."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as why:
        raise MixerError(
            f"{where}: its weights do not fit the model ({' '.join(str(why).split())[:300]}); "
            + "`tokenmix convert` adapts weights to another model."
        ) from None


def _build_saved(config: Any, tensors: dict[str, Tensor], where: Path) -> nn.Module:
    with torch.random.fork_rng():
        model = build_model(config)
    load_weights(model, tensors, where)
    return model.eval()


def _read_json(path: Path) -> Record:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as why:
        raise MixerError(f"{path} is not readable JSON ({why}).") from None
    if not isinstance(found, dict):
        raise MixerError(f"{path} holds no JSON object.")
    return found
