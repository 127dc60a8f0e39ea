"""Training runs from their start and from where they stopped: a config in, a run directory out."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...errors import MixerError
from ...models.saved import pick_step
from ...system.checkpoint import check_can_save, list_steps, remove_checkpoint, sweep
from ...system.config import dotted_fields, nearest
from ...system.files import check_free, write_json
from ...system.machine import is_first_rank, torch_threads
from ...types import Options, Record
from .config import ENDING, FIXED, RunConfig, TrainConfig
from .idle_settings import idle_settings
from .loop import Trainer
from .own import OwnData, Parts
from .registry import OwnModel
from .rundir import RunDir, differences, environment
from .sinks import check_sinks
from .stopping import explain_interrupt
from .world import World, join_ranks, was_restarted

SECTIONS = ("model", "data", "optim", "train")


def train(
    config: RunConfig | TrainConfig,
    out: Path | str,
    *,
    verbose: bool | None = None,
    limits: dict[int, float] | None = None,
    about: str = "",
    resume: bool = False,
    **parts: Any,
) -> Record:
    """Train into the run directory ``out`` and return a summary; everything else is in the directory.

    Any part of the run may be an object of your own; docs/own-parts.md has an example of each. Whatever has a
    ``state_dict`` of tensors and JSON is saved with each checkpoint.

    Args:
        config: of the whole run, or with ``model``, ``batches`` and ``loss`` only its loop (``TrainConfig``).
        verbose: show a progress bar; None: on a terminal, and a plain line every 15 s elsewhere.
        limits: scores by step; a run that is not better than the one at an evaluation ends there.
        about: one line on the config, shown before the first step.
        resume: continue the run in ``out``, if there is one. Its objects must be the same: their code is compared.
        parts: by name, each optional:
            model: an ``nn.Module``, or a function without arguments that builds one, in place of ``config.model``.
            batches: in place of ``config.data``: a function (step) -> (inputs, targets), a list of such pairs, or a
                loader with a state. Inputs are a tensor, or a named tuple or a dictionary of the model's arguments.
            valid: batches of validation, a list or a loader, whose mean loss is the run's score.
            loss: (outputs, targets) -> mean loss. With ``batches``, integer targets of -100 count as none.
            optimizer: a function (parameters) -> ``torch.optim.Optimizer``, or an optimiser. Its rates are the highest
                ones; of ``config.optim`` only the schedule, clipping and averages are used.
            schedule: a function (step) -> multiple of the highest rate, in place of ``config.optim.schedule``.
            callbacks: objects with ``on_step(step, model)``, ``on_evaluate(step, model)`` or both; a function is called
                at evaluations. The numbers that it returns, as a dictionary, join the line of the evaluation.
            on_log: a function of each line of metrics, a dictionary with "kind" "train" or "eval" and "step".

    Raises:
        MixerError: if the config, the data or the directory cannot be used, or if the disk is full; after making room,
            ``resume(out)`` continues the run.
    """
    own = Parts(**_known_parts(parts))
    if isinstance(config, TrainConfig):
        config = RunConfig(OwnModel(), OwnData(), train=config)
    config = own.place_in(config) if own.objects() else config
    check_can_save()
    check_sinks(config.train)
    RunConfig.from_json(config.to_json())  # as whoever opens the run will read it
    with join_ranks("train") as world_of:
        if was_restarted() and (Path(out) / "config.json").is_file():
            return _resume(world_of, out, verbose=verbose, limits=limits, parts=own)
        if resume and (Path(out) / "config.json").is_file():
            return _resume(world_of, out, verbose=verbose, limits=limits, parts=own, given=config)
        world = world_of(config)
        device = world.pick_device(config.train.device)
        check_free(out)
        with explain_interrupt(Path(out)), torch_threads(config.train.threads):
            trainer = Trainer(config, RunDir(out), device, verbose=verbose, limits=limits, world=world, parts=own)
            env = environment(trainer.task.facts(), device)
            env |= {**trainer.facts, "score": trainer.task.score(), "resumed": []}
            read, lines = trainer.task.inventory(), [about] * bool(about)
            if read is not None:
                env["inventory"] = read.to_json()
                lines += read.lines()
            if lines and world.first and verbose is not False:
                print("\n".join(lines), file=sys.stderr, flush=True)
            _warn_of_idle(config, world, verbose)
            env["config"] = digest_of(trainer.progress.config)
            world.wait()  # nobody looks for the directory any more
            if not world.first:
                return trainer.run()
            trainer.run_dir = RunDir.create(out, config, env, trainer.task.files())
            with trainer.run_dir.lock():
                return trainer.run()


def resume(
    out: Path | str,
    *,
    from_step: int | None = None,
    changes: Options | None = None,
    verbose: bool | None = None,
    limits: dict[int, float] | None = None,
) -> Record:
    """Continue a run from its last checkpoint, or from its start if it has none, as if it had never stopped.

    Args:
        from_step: an earlier checkpoint to continue from; later ones are deleted, and metrics.jsonl is cut back to it.
        changes: dotted fields of ``train.`` to change from here on, such as ``{"train.steps": 2000}``; saved in
            config.json.
        verbose: as in ``train``.
        limits: as in ``train``.
    """
    check_can_save()
    with join_ranks("resume") as world_of:
        return _resume(world_of, out, from_step=from_step, changes=changes, verbose=verbose, limits=limits)


def _resume(
    world_of: Callable[[RunConfig], World],
    out: Path | str,
    *,
    from_step: int | None = None,
    changes: Options | None = None,
    verbose: bool | None = None,
    limits: dict[int, float] | None = None,
    parts: Parts | None = None,
    given: RunConfig | None = None,
) -> Record:
    """Continue a run with the processes that have been joined; see ``resume``.

    Args:
        parts: the objects of the caller; None: those that the run names are imported.
        given: the config of the caller, whose fields of ``train.`` may differ from those of the run.
    """
    run = RunDir.open(out)
    config, env = run.config(), run.env()
    parts = Parts.load(config.own, out) if parts is None else parts
    parts.check_same(config.own, out)
    changes = changes if given is None else _changed_fields(config, given)
    config = _with_changes(config, changes or {})
    check_sinks(config.train)
    world = world_of(config)
    device = world.pick_device(config.train.device)
    lock = run.lock() if world.first else nullcontext()
    with explain_interrupt(run.path), lock, torch_threads(config.train.threads or env.get("threads")):
        if world.first:
            sweep(run.checkpoints)
        step = from_step if from_step is not None else (pick_step(run.path) if list_steps(run.checkpoints) else 0)
        trainer = Trainer(config, run, device, verbose=verbose, limits=limits, world=world, parts=parts)
        trainer.task.check_same(env)
        if config.train.steps is not None and config.train.steps < step and "train.steps" in (changes or {}):
            raise MixerError(
                f"resume: train.steps={config.train.steps} is less than the {step} steps that {run.path} has done; "
                + "give more, or an earlier checkpoint to go back to (--from)."
            )
        if (moved := moved_schedule(run.config(), config)) and world.first:
            warnings.warn(f"resume: {moved}", stacklevel=4)
        if step in list_steps(run.checkpoints) or from_step is not None:
            trainer.load(step)
        elif env.get("config", digest_of(trainer.progress.config)) != digest_of(trainer.progress.config):
            raise MixerError(
                f"{run.path / 'config.json'} was edited since this run began; restore it, or start a new run."
            )
        elif world.first:
            warnings.warn(f"{out}: nothing was saved yet, so the run starts from the beginning.", stacklevel=3)
        world.wait()  # all have read what the first one changes now
        if not world.first:
            return trainer.run()
        changed = differences(env, environment(trainer.task.facts(), device))
        if changed:
            warnings.warn(
                f"{out}: {'; '.join(changed)}. The run continues, but its numbers may differ from those of an "
                + "uninterrupted one.",
                stacklevel=3,
            )
        env.setdefault("resumed", []).append({"step": step, "changed": changed})
        if changes:
            _warn_of_idle(config, world, verbose)
            write_json(run.path / "config.json", config.to_json())
        write_json(run.path / "env.json", env)
        for later in list_steps(run.checkpoints):
            if later > step:
                remove_checkpoint(run.checkpoints, later)
        run.cut_metrics(step)
        return trainer.run()


def _warn_of_idle(config: RunConfig, world: World, verbose: bool | None) -> None:
    found = idle_settings(config, world.ranks) if verbose is not False and is_first_rank() else []
    if found:
        warnings.warn(f"settings without effect: {'; '.join(found)}.", stacklevel=3)


def moved_schedule(before: RunConfig, after: RunConfig) -> str:
    """Say what another number of steps does to the schedule of the rate; "" where that changes nothing."""
    then, now, name = before.train.steps, after.train.steps, after.optim.schedule
    if then == now or now is None or name not in ENDING:
        return ""
    was, how = "no end by steps" if then is None else f"{then:,}", "shortened" if then and now < then else "stretched"
    return (
        f"train.steps was {was}, is {now:,}: the {name} schedule is {how} to its new end, so from here on the rate is "
        + f"that of a run of {now:,} steps, not that of the run so far."
    )


def digest_of(fields: Record | None) -> str:
    """Return the sha256 of a config's fields."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _changed_fields(before: RunConfig, after: RunConfig) -> Options:
    """Return the dotted fields of a config that differ from those of another, without the names of their recipe."""
    then, now = (dotted_fields({k: v for k, v in c.to_json().items() if k in SECTIONS}) for c in (before, after))
    return {name: value for name, value in now.items() if then.get(name) != value}


def _known_parts(parts: Options) -> Options:
    known = [f.name for f in fields(Parts)]
    for name in parts:
        if name not in known:
            raise MixerError(f"train: there is no part {name!r}; {nearest(name, known)}.")
    return parts


def _with_changes(config: RunConfig, changes: Options) -> RunConfig:
    fixed = [f"train.{name}" for name in FIXED]
    for name in changes:
        if not name.startswith("train.") or name in fixed:
            raise MixerError(
                f"resume: {name} cannot change in the middle of a run; "
                + "fields such as train.steps, train.max_seconds and train.save_every can."
            )
    return config.override(changes) if changes else config
