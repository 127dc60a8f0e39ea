"""The tables of a report, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...errors import MixerError
from ...models import SHELLS, config_from_json, shell_of
from ...system.text import MISSING, Table, number, size
from ...types import Record
from ..data.long_tail import FEW, MANY, SHOTS
from .runs import ANSWERS, CLASSES, DENSITY, FLOW, MASKS, PAIRS, PARTS, PIXELS, TEXT, Run

COUNTED, RATE = ("tokens", "images", "clouds"), "_per_s"
"""What runs count their speed in, of which columns come first, and how the field of a speed ends."""
IOU = "the intersection over the union of a class's true and predicted pixels in the whole split, mean over the classes"


def mixers_of(config: Record) -> str:
    """Describe the mixers of a run's layers: ``3 x aft_local, 1 x attention``."""
    model = config.get("model", {})
    model = model.get("backbone", model)  # a segmentation model has its layers there
    specs, depths = list(model.get("mixers", [])), list(model.get("depths", []))
    if specs and len(specs) == len(depths):  # one for each stage of a pyramid
        specs = [spec for spec, depth in zip(specs, depths, strict=True) for _ in range(depth)]
    layers = model.get("layers") or sum(depths) or len(specs)
    names = [specs[i % len(specs)].get("name", "unnamed") for i in range(layers)] if specs else []
    return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)) or MISSING


def shell_in(config: Record) -> str:
    """Return the shell of a run's model: "paper", "modern" or "neither"."""
    try:
        shell = shell_of(config_from_json({"kind": "lm", **config["model"]}))
    except (MixerError, KeyError):
        return MISSING
    return shell if shell in SHELLS else "neither"


def optimiser_in(config: Record) -> str:
    """Return the optimiser of a run; runs from before there was a choice had AdamW."""
    optim = config.get("optim")
    return str(optim.get("name", "adamw")) if isinstance(optim, dict) else MISSING


def summary_table(runs: list[Run]) -> Table:
    """Build the table with one row per run."""
    columns: dict[str, Callable[[Run], str]] = {
        "run": lambda run: run.name,
        "layers": lambda run: mixers_of(run.config),
        "shell": lambda run: shell_in(run.config),
        "optimiser": lambda run: optimiser_in(run.config),
        "parameters": lambda run: number(run.env.get("parameters"), 0),
        "steps": lambda run: number(run.largest("step"), 0),
    }
    counted = dict.fromkeys(key.removesuffix(RATE) for run in runs for line in run.train for key in line if RATE in key)
    units = [*COUNTED, *(unit for unit in counted if unit not in COUNTED)]
    for unit in units:
        columns[unit] = partial(_largest, unit=unit)
    for metric in (TEXT, DENSITY, PAIRS, PIXELS, FLOW):
        for split in ("valid", "test"):
            columns[f"{split} {metric.label}"] = partial(_score, split=split, metric=metric.name)
    for metric in (CLASSES, ANSWERS, PARTS):
        for split in ("valid", "test"):
            columns[f"{split} {metric.label}"] = partial(_percent, split=split, metric=metric.name)
            for shots in SHOTS if metric is CLASSES else ():
                columns[f"{split} {shots}"] = partial(_percent, split=split, metric=f"{metric.name}_{shots}")
    for metric in dict.fromkeys(run.metric for run in runs if run.metric.own):
        for split in ("valid", "test"):
            columns[f"{split} {metric.label}"] = partial(_score, split=split, metric=metric.name)
    for split in ("valid", "test"):
        columns[f"{split} {MASKS.label}"] = partial(_percent, split=split, metric=MASKS.name)
        columns[f"{split} pixels right"] = partial(_percent, split=split, metric="pixel_accuracy")
    for unit in units:
        columns[f"{unit}/s"] = partial(_speed, unit=unit)
    columns["peak memory"] = lambda run: size(
        None if run.largest("peak_mib") is None else (run.largest("peak_mib") or 0) * 2**20
    )
    columns["state"] = lambda run: size(run.env.get("state_bytes_per_row"))
    rows = [[cell(run) for cell in columns.values()] for run in runs]
    return without_empty_columns(Table("Runs", list(columns), rows, _notes(runs)))


def _largest(run: Run, *, unit: str) -> str:
    return number(run.largest(unit), 0)


def _speed(run: Run, *, unit: str) -> str:
    return number(run.median(f"{unit}{RATE}"), 0)


def _score(run: Run, *, split: str, metric: str) -> str:
    return number(run.last_eval(split, metric))


def _percent(run: Run, *, split: str, metric: str) -> str:
    found = run.last_eval(split, metric)
    return MISSING if found is None else f"{100 * found:.2f} %"


def _notes(runs: list[Run]) -> list[str]:
    texts = {"bits_per_byte": "Bits per byte", "bits_per_dim": "Bits per dimension", "pixel_loss": "Pixel loss"}
    texts["flow_loss"] = "Flow loss (of the velocity, per number of an image)"
    kinds = dict.fromkeys(texts[r.metric.name] for r in runs if r.metric.name in texts)
    said = [f"{' and '.join(kinds)}: lower is better"] if kinds else []
    said += [
        f"{label.capitalize()}: the share of correct first guesses, higher is better"
        for label in dict.fromkeys(r.metric.label for r in runs if r.metric.accuracy and r.metric not in (MASKS, PARTS))
    ]
    for metric in dict.fromkeys(run.metric for run in runs if run.metric.own):
        said.append(f"{metric.label.capitalize()}: {'higher' if metric.higher else 'lower'} is better")
    if any(r.metric is PARTS for r in runs):
        said.append("Instance mIoU: the mean over clouds of intersection over union of their parts, higher is better")
    said += [f"mIoU: {IOU}, higher is better"] if any(r.metric is MASKS for r in runs) else []
    scores = [f"{'; '.join(said)}. Of the evaluations of a run on the most data, the last."] if said else []
    if any(run.last_eval(split, f"top1_{s}") is not None for run in runs for split in ("valid", "test") for s in SHOTS):
        scores = [
            *scores,
            f"Many, medium, few: top-1 on the classes with more than {MANY}, {FEW} to {MANY}, and fewer than {FEW} "
            + "training images.",
        ]
    speed = "Tokens/s, images/s and clouds/s: the median over the logged training steps."
    notes = [f"{' '.join(scores)} {speed}", "Peak memory: the most the training process held."]
    shells = "Shell: the blocks around the mixers, as in the papers, as of today (modern), or neither."
    contexts = sorted({r.env["state_context"] for r in runs if "state_context" in r.env})
    return [notes[0], f"{notes[1]} {_state_note(contexts)}" if contexts else notes[1], shells]


def iou_table(runs: list[Run]) -> Table | None:
    """Build the table of intersection over union, one row per class; None if no run has any."""
    columns = _columns_by(runs, "iou")
    if not columns:
        return None
    names = dict.fromkeys(name for _, found in columns for name in found)
    rows = [[n, *(f"{100 * found[n]:.2f} %" if n in found else MISSING for _, found in columns)] for n in names]
    notes = [
        "A class that occurs neither in the masks nor in the predictions has none, and does not count in the mean."
    ]
    return Table("Intersection over union by class", ["class", *(name for name, _ in columns)], rows, notes)


def noise_table(runs: list[Run]) -> Table | None:
    """Build the table of the flow loss by share of noise, one row per share; None if no run has any."""
    columns = _columns_by(runs, "by_noise")
    if not columns:
        return None
    shares = dict.fromkeys(share for _, found in columns for share in found)
    rows = [[f"{share} %", *(number(found.get(share)) for _, found in columns)] for share in shares]
    notes = ["Noise: t of the image (1 - t) x + t e that the model reads. Losses of different shares do not compare."]
    return Table("Flow loss by share of noise", ["noise", *(name for name, _ in columns)], rows, notes)


def _columns_by(runs: list[Run], field: str) -> list[tuple[str, dict[str, float]]]:
    """Return a heading and what a field of the last evaluation holds, for each run and split that has it."""
    return [
        (f"{run.name}, {split}" if len(runs) > 1 else split, found)
        for run in runs
        for split in ("valid", "test")
        if (found := run.last_eval(split, field))
    ]


def without_empty_columns(table: Table) -> Table:
    """Return the table without the columns in which no row has a measurement."""
    kept = [i for i in range(len(table.columns)) if i == 0 or any(row[i] != MISSING for row in table.rows)]
    return Table(
        table.title, [table.columns[i] for i in kept], [[row[i] for i in kept] for row in table.rows], table.notes
    )


def _state_note(contexts: list[int]) -> str:
    lengths = " or ".join(f"{n:,}" for n in contexts)
    return f"State: what the model keeps between two generated tokens, for one sequence of {lengths} tokens."


def facts_table(runs: list[Run]) -> Table:
    """Build the table of machine and data, one row per fact; facts that all runs share are written once."""
    flat = [
        {
            **flatten("env", r.env),
            **flatten("data", r.config.get("data", {})),
            **flatten("seed", r.config.get("seed", {})),
        }
        for r in runs
    ]
    keys = list(dict.fromkeys(k for f in flat for k in f))
    rows = []
    for key in keys:
        values = [f.get(key, "not recorded") for f in flat]
        if len(set(values)) == 1:
            rows.append([key, values[0]])
        else:
            rows.append([key, "; ".join(f"{r.name}: {v}" for r, v in zip(runs, values, strict=True))])
    return Table("Machine, data and seed", ["fact", "value"], rows or [["env.json", "not recorded"]])


def flatten(prefix: str, value: object) -> dict[str, str]:
    """Return the values inside of nested objects by dotted names, as text; those without content are left out."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flatten(f"{prefix}.{key}", inner).items()}
    if value in (None, {}, "none"):
        return {}
    return {prefix: ", ".join(str(v) for v in value) if isinstance(value, list) else str(value)}
