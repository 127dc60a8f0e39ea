"""Read a run directory: config.json, env.json, metrics.jsonl, samples/, checkpoints/."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import MixerError
from ...system.files import check_own, is_own
from ...system.text import named_apart
from ...types import Record
from ..data.metrics_csv import write_csv
from ..data.records import bad_text, read_records

NUMBERS = ("parameters", "state_bytes_per_row", "state_context")  # of env.json, in tables
STEP = re.compile(r"step_[0-9]+")
WEIGHTS, AVERAGE = "model.safetensors", "ema.safetensors"  # a run that averages its weights is scored with the average


UNITS = ("bytes", "images", "pairs", "texts", "clouds")
"""What an evaluation counts its data in."""


def on_most_data(evals: Sequence[Record]) -> list[Record]:
    """Return the evaluations on the most data; a score of a hundred bytes has no place beside them.

    Nor have those of other sizes or passes than the model was trained with.
    """
    evals = [e for e in evals if "grid" not in e and "passes" not in e]
    sizes = [next((e[unit] for unit in UNITS if isinstance(e.get(unit), int)), 0) for e in evals]
    most = max(sizes, default=0)
    return [e for e, size in zip(evals, sizes, strict=True) if size == most]


@dataclass(frozen=True)
class Metric:
    """The score of a run.

    Args:
        name: field of its evaluations.
        label: what the score is called.
        loss: unit of the loss in its curves.
        nats: nats in that unit.
        accuracy: whether the score is a share, of right answers or of an area, which is better the higher it is and is
            written in per cent; the evaluations then hold a ``cross_entropy`` too.
        higher: whether it is better the higher it is without being such a share.
        own: whether it is that of a task outside of the package, whose unit is not that of the loss.
    """

    name: str
    label: str
    loss: str
    nats: float
    accuracy: bool = False
    higher: bool = False
    own: bool = False


TEXT = Metric("bits_per_byte", "bits/byte", "bits per byte", math.log(2))
DENSITY = Metric("bits_per_dim", "bits/dim", "bits per dimension", math.log(2))
CLASSES = Metric("top1", "top-1", "cross-entropy in nats", 1.0, accuracy=True)
ANSWERS = Metric("accuracy", "accuracy", "cross-entropy of the answers in nats", 1.0, accuracy=True)
PAIRS = Metric("cross_entropy", "cross-entropy", "cross-entropy in nats", 1.0)
LABELS = Metric("accuracy", "accuracy", "cross-entropy in nats", 1.0, accuracy=True)
MASKS = Metric("miou", "mIoU", "cross-entropy of a pixel in nats", 1.0, accuracy=True)
PARTS = Metric("instance_miou", "instance mIoU", "cross-entropy in nats", 1.0, accuracy=True)
PIXELS = Metric("pixel_loss", "pixel loss", "squared error of the hidden pixels", 1.0)
FLOW = Metric("flow_loss", "flow loss", "squared error of the velocity", 1.0)
BY_DATA = {"synthetic": ANSWERS, "pairs": PAIRS, "documents": PAIRS, "labels": LABELS, "masks": MASKS}
ON_MODELS = (None, "text", "images", "points")
"""Kinds of data of which several kinds of models have different scores; the first is that of the oldest runs."""
BY_MODEL = {
    "lm": TEXT,
    "image_density": DENSITY,
    "point_classifier": LABELS,
    "point_segmenter": PARTS,
    "mae": PIXELS,
    "dit": FLOW,
}


@dataclass(frozen=True)
class Run:
    """The contents of a run directory.

    Args:
        train: the lines of metrics.jsonl of kind "train", in order.
        evals: the lines of kind "eval", in order.
        samples: (file name, text) of each sample; bytes that are not UTF-8 are written as \\xNN.
        drawn: the PNGs among the samples.
        weights: the newest checkpoint's weights, None before the first checkpoint.
    """

    name: str
    path: Path
    config: Record
    env: Record
    train: list[Record]
    evals: list[Record]
    samples: list[tuple[str, str]]
    drawn: list[Path]
    weights: Path | None

    @property
    def metric(self) -> Metric:
        """What the run's evaluations measure."""
        return metric_of(self.config, self.env)

    def last_eval(self, split: str, metric: str | None = None) -> Any:
        """Return the last score on a split, of those on the most data; None where there is none of this metric."""
        name = self.metric.name if metric is None else metric
        found = self._last_score(split, name)
        return None if found is None else found[name]

    def scored_on(self, split: str) -> str | None:
        """Return how much that score was of, and in which windows if not the run's own, as text."""
        found = self._last_score(split, self.metric.name)
        if found is None:
            return None
        parts = [f"{found[unit]:,} {unit}" for unit in UNITS if isinstance(found.get(unit), int)]
        data = self.config.get("data")
        own = data.get("seq_len") if isinstance(data, dict) else None
        parts += [f"windows of {found['seq_len']}"] if found.get("seq_len", own) != own else []
        return " in ".join(parts) or None

    def score_line(self, split: str) -> Record | None:
        """Return the line of that score, None where there is none."""
        return self._last_score(split, self.metric.name)

    def _last_score(self, split: str, name: str) -> Record | None:
        found = on_most_data([e for e in self.evals if e.get("split") == split and name in e])
        return found[-1] if found else None

    def median(self, key: str) -> float | None:
        """Return the median of a field over the logged training steps, without the first tenth, which is warm-up."""
        values = sorted(row[key] for row in self.train[len(self.train) // 10 :] if row.get(key) is not None)
        return values[len(values) // 2] if values else None

    def largest(self, key: str) -> float | None:
        """Return the largest value of a field over the logged training steps."""
        return max((row[key] for row in self.train if row.get(key) is not None), default=None)


def of_own_task(config: Record) -> bool:
    """Return whether a run's task is one outside of the package, of which only the run itself says how it is scored."""
    return config.get("data", {}).get("kind") not in (*BY_DATA, *ON_MODELS)


def metric_of(config: Record, env: Record) -> Metric:
    """Return what the evaluations of a run measure: by its config, or as its env.json has it of a task of your own."""
    data, score = config.get("data", {}), env.get("score")
    if of_own_task(config) and isinstance(score, dict):
        name = str(score.get("metric"))
        higher = bool(score.get("higher"))
        return Metric(name, str(score.get("label", name)), "loss of the task", 1.0, higher=higher, own=True)
    found = BY_DATA.get(data.get("kind")) or BY_MODEL.get(config.get("model", {}).get("kind", "lm"), CLASSES)
    loss = str(data.get("loss", "cross_entropy"))
    if found is not CLASSES or loss == "cross_entropy":
        return found
    said = loss.replace("_", " ").replace("bce", "BCE").replace("cross entropy", "cross-entropy")
    return replace(CLASSES, loss=f"{said} in nats")


def read_run(path: Path | str) -> Run:
    """Read one run directory; a run in progress or stopped early is read as far as it got."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise MixerError(f"report: {path} is not a run directory; it has no config.json.")
    config = _json_object(path / "config.json")
    if "model_type" in config or config.get("kind") == "surgery":
        raise MixerError(f"report: {path} is no run but the folder of a host, which has no curves.")
    for part in ("model", "data", "own"):
        if not isinstance(config.get(part, {}), dict):
            raise MixerError(f"report: {path / 'config.json'}: {part} must be an object, got {config[part]!r}.")
    env = _json_object(path / "env.json") if (path / "env.json").is_file() else {}
    metrics = _json_lines(path / "metrics.jsonl")
    return Run(
        name=path.resolve().name,
        path=path,
        config=config,
        env={k: v for k, v in env.items() if k not in NUMBERS or type(v) in (int, float)},
        train=[m for m in metrics if m.get("kind") == "train"],
        evals=[m for m in metrics if m.get("kind") == "eval"],
        samples=[(p.name, readable(p.read_bytes())) for p in _samples(path) if p.suffix != ".png"],
        drawn=[p for p in _samples(path) if p.suffix == ".png"],
        weights=_newest_weights(path / "checkpoints"),
    )


def _samples(run: Path) -> list[Path]:
    """Return the files of a run's samples; what is no file of the run itself is left out with a warning."""
    found = sorted((run / "samples").glob("*"))
    if other := [p.name for p in found if not p.is_dir() and not is_own(p, run)]:
        warnings.warn(
            f"report: {run / 'samples'}: {', '.join(map(_name_text, other[:3]))}{', ...' * (len(other) > 3)} left out, "
            + "as only files of the run itself are read, and no links.",
            stacklevel=3,
        )
    return [p for p in found if is_own(p, run)]


def write_metrics(run_dirs: Sequence[Path | str], out: Path | str) -> Path:
    """Write the metrics of several runs as one CSV table and return its path.

    Each line of a run's metrics is a row, with the run's name in the column ``run``; a field is a column, and those of
    nested objects have dotted names.
    """
    paths = [Path(d) for d in run_dirs]
    lines = [
        {"run": name, **line}
        for path, name in zip(paths, named_apart(paths), strict=True)
        for line in _json_lines(path / "metrics.jsonl")
    ]
    write_csv(Path(out), lines)
    return Path(out)


def load_model(run: Run) -> Any:
    """Load the run's model, of any kind, with its newest weights.

    None where there is no checkpoint, and for a model of the user's own, whose code a report never imports.
    """
    if run.weights is None or "model" in run.config.get("own", {}):
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from ...models import build_model, config_from_json

    try:
        model = build_model(config_from_json({"kind": "lm", **run.config["model"]}))
    except MixerError as why:
        raise MixerError(f"report: {run.path / 'config.json'}: {why}") from None
    except (RuntimeError, MemoryError, OverflowError, TypeError, KeyError) as why:
        said = " ".join(str(why).split())[:120]
        raise MixerError(f"report: {run.path / 'config.json'} describes no model that can be built ({said}).") from None
    try:
        weights = load_file(run.weights)
    except (SafetensorError, OSError) as why:
        raise MixerError(
            f"report: {run.weights} is truncated or edited ({why}); remove that checkpoint to use the one before it."
        ) from why
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        gaps = f"missing {missing}, unexpected {unexpected}" if missing or unexpected else ""
    except RuntimeError as why:  # of tensors of another size
        gaps = " ".join(str(why).split())[:300]
    if gaps:
        config = run.path / "config.json"
        raise MixerError(f"report: {run.weights} does not fit the model of {config}: {gaps}.")
    return model.eval()


def readable(data: bytes) -> str:
    """Convert bytes to text that a page can show: bytes that are not UTF-8, and control characters, as \\xNN."""
    text = data.decode("utf-8", errors="backslashreplace")
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _name_text(name: str) -> str:
    """Return the name of a file as a line shows it."""
    return readable(name.encode("utf-8", "surrogateescape")).replace("\n", "\\n")[:80]


def _json_object(path: Path) -> Record:
    check_own(path, path.parent)
    try:
        data = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as why:
        raise MixerError(f"report: {path} cannot be read ({why}).") from why
    if not isinstance(data, dict):
        raise MixerError(f"report: {path} must hold a JSON object.")
    return data


def _json_lines(path: Path) -> list[Record]:
    """Read the complete lines; a last one without its newline is still being written or was cut off by a kill.

    Damaged lines are skipped with a warning.
    """
    check_own(path, path.parent)
    try:
        lines, bad = read_records(path)
    except OSError as why:
        raise MixerError(f"report: {path} cannot be read ({why.strerror or why}).") from why
    if bad:
        warnings.warn(f"report: {path}: {bad_text(bad)}; skipped.", stacklevel=4)
    return lines


def _newest_weights(folder: Path) -> Path | None:
    found = sorted(
        (p for p in folder.glob("step_*") if STEP.fullmatch(p.name) and is_own(p / WEIGHTS, folder.parent)),
        key=lambda p: int(p.name.removeprefix("step_")),
    )
    if not found:
        return None
    return found[-1] / AVERAGE if is_own(found[-1] / AVERAGE, folder.parent) else found[-1] / WEIGHTS
