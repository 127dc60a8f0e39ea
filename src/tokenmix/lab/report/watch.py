"""Follow running experiments: find run directories, tail their metrics, report their status."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import MixerError
from ...system.config import nearest
from ...system.files import check_own
from ...system.lock import read_lock
from ...system.text import named_apart
from ...types import Record
from ..data.metrics_csv import flatten_metrics
from ..data.records import parse_records
from .runs import Metric, Run, metric_of, of_own_task, on_most_data

DEPTH = 6
"""Levels of folders in which runs are searched."""
RECENT = 20
"""Lines of training over which the time left is estimated."""
OVERLAP = 256
"""Bytes before the part of a file already read that must still be the same."""


class Tail:
    """A metrics file that is read as it grows; if it was truncated or replaced, it is read again from its start."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[Record] = []
        self.bad = 0
        self._file, self._end, self._last = (0, 0), 0, b""

    def read(self) -> bool:
        """Read new lines and return whether there were any; an incomplete last line is left for the next call.

        Raises:
            OSError: if there is no such file, or none that can be read.
        """
        check_own(self.path, self.path.parent)
        with self.path.open("rb") as f:
            found = os.fstat(f.fileno())
            start = self._end - len(self._last)
            f.seek(start)
            content = f.read()
            again = (found.st_dev, found.st_ino) != self._file or not content.startswith(self._last)
            if again:
                f.seek(0)
                start, content, self._last = 0, f.read(), b""
        added = content[len(self._last) : content.rfind(b"\n") + 1]
        good, bad = parse_records(added)
        changed = bool(added) or (again and bool(self.lines))
        self.lines = [*([] if again else self.lines), *good]
        self.bad = len(bad) + (0 if again else self.bad)
        self._file, self._end = (found.st_dev, found.st_ino), start + len(self._last) + len(added)
        self._last = (self._last + added)[-OVERLAP:]
        return changed


class Watched:
    """One run directory: its metrics so far, its state, and what went wrong when it was read."""

    def __init__(self, path: Path):
        self.path, self.name = path, path.name
        self.tail = Tail(path / "metrics.jsonl")
        self.config: Record = {}
        self.env: Record = {}
        self.state, self.trouble = "new", ""

    def read(self) -> bool:
        """Read the run again and return whether anything has changed. A run that cannot be read says why."""
        before = (self.state, self.trouble)
        changed, self.trouble = False, ""
        try:
            self.config = _config(self.path / "config.json")
            if of_own_task(self.config) and not self.env:
                self.env = _config(self.path / "env.json")
            changed = self.tail.read()
        except OSError as why:
            missing = isinstance(why, FileNotFoundError)
            what = "is missing" if missing else f"cannot be read ({why.strerror or why})"
            self.trouble = f"{Path(str(why.filename)).name} {what}"
        except MixerError as why:
            self.trouble = str(why)
        self.state = self._state()
        if self.state == "deleted":
            self.trouble = "the run directory was deleted"
        elif self.tail.bad and not self.trouble:
            count = f"{self.tail.bad} {'line' if self.tail.bad == 1 else 'lines'}"
            self.trouble = (
                f"{count} of metrics.jsonl cannot be read and {'is' if self.tail.bad == 1 else 'are'} left out"
            )
        return changed or before != (self.state, self.trouble)

    def _state(self) -> str:
        """Return what has become of the run.

        It is running, finished, stopped (on request), failed (with an error), killed, deleted, or new (never begun).
        """
        if not self.path.is_dir():
            return "deleted"
        held, note = read_lock(self.path)
        if held:
            return "running"
        if self.done >= 1 and self._newest_checkpoint() >= self.step:
            return "finished"
        if note["state"] == "ended" and not (self.path / "checkpoints").is_dir():
            return "finished"  # a loop that is not ours, which keeps its checkpoints elsewhere
        if note["state"] == "failed" and not self.trouble:
            self.trouble = note["why"]
        if note["state"] == "running":
            return "running?" if held is None else "killed"
        if note["state"] in ("stopped", "failed"):
            return note["state"]
        return "stopped" if self.tail.lines else "new"

    def _newest_checkpoint(self) -> int:
        """Return the step of the newest checkpoint, -1 before the first."""
        names = [p.name.removeprefix("step_") for p in (self.path / "checkpoints").glob("step_*")]
        return max((int(name) for name in names if name.isascii() and name.isdigit()), default=-1)

    @property
    def run(self) -> Run:
        """The run as reports read it, without what is not in its metrics."""
        lines = self.tail.lines
        train, evals = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
        return Run(self.name, self.path, self.config, self.env, train, evals, [], [], None)

    @property
    def metric(self) -> Metric:
        """What the run's evaluations measure."""
        return metric_of(self.config, self.env)

    @property
    def last(self) -> Record:
        """The last line of training; empty before the first."""
        return next((line for line in reversed(self.tail.lines) if line["kind"] == "train"), {})

    @property
    def step(self) -> int:
        """The last step in the metrics."""
        return max((line["step"] for line in self.tail.lines if line["kind"] == "train"), default=0)

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """The steps and the seconds after which the run ends."""
        loop = self.config.get("train")
        if isinstance(loop, dict):
            return _number(loop.get("steps")), _number(loop.get("max_seconds"))
        layers, both = _number(self.config.get("layer_steps")), _number(self.config.get("steps"))
        return (None if both is None else both + (layers or 0)), None  # a distillation

    @property
    def done(self) -> float:
        """The completed fraction of the run, 0 where that is unknown."""
        steps, seconds = self.limits
        by_time = (float(self.last.get("seconds", 0.0)) + 0.001) / seconds if seconds and self.last else 0.0
        return min(1.0, max(self.step / steps if steps else 0.0, by_time))

    @property
    def left(self) -> float | None:
        """The seconds of training left, at the pace of the last lines; None where that is unknown."""
        steps, seconds = self.limits
        recent = [line for line in self.tail.lines if line["kind"] == "train" and "seconds" in line][-RECENT:]
        if not recent:
            return None
        first, last = (recent[0] if len(recent) > 1 else {"step": 0, "seconds": 0.0}), recent[-1]
        found = []
        if steps and last["step"] > first["step"]:
            pace = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
            found.append(pace * (steps - last["step"]))
        if seconds:
            found.append(seconds - last["seconds"])
        return max(0.0, min(found)) if found else None

    @property
    def best(self) -> float | None:
        """The best score on the validation split."""
        name = self.metric.name
        evals = [e for e in self.tail.lines if e["kind"] == "eval" and e["split"] == "valid" and name in e]
        scores = [e[name] for e in on_most_data(evals)]
        scores = [s for s in scores if s == s]
        return None if not scores else max(scores) if self.metric.accuracy or self.metric.higher else min(scores)


class Watch:
    """The runs in some folders, in the order in which they were found.

    Args:
        folders: run directories, and folders that contain run directories, at most ``DEPTH`` levels deep.
    """

    def __init__(self, folders: Sequence[Path | str]):
        self.folders = [Path(folder) for folder in folders]
        for folder in self.folders:
            if not folder.is_dir():
                what = "is a file" if folder.exists() else "does not exist"
                raise MixerError(
                    f"report --watch: {folder} {what}; give run directories, or folders that contain some."
                )
        self.runs: dict[Path, Watched] = {}

    def read(self) -> bool:
        """Find new runs, read all of them again, and return whether anything has changed."""
        known = len(self.runs)
        for folder in self.folders:
            for path in sorted(find_runs(folder)):
                self.runs.setdefault(path.resolve(), Watched(path))
        if len(self.runs) > known:
            for run, name in zip(self.runs.values(), named_apart(list(self.runs)), strict=True):
                run.name = name
        changed = [run.read() for run in self.runs.values()]
        return len(self.runs) > known or any(changed)

    def notes(self) -> list[str]:
        """Return one line for each folder without a run and for each run in which something is wrong."""
        found = [f"{run.name}: {run.trouble}" for run in self.runs.values() if run.trouble]
        empty = [f for f in self.folders if not any(p.is_relative_to(f.resolve()) for p in self.runs)]
        return [*(f"{folder}: no run in it yet" for folder in empty), *found]

    def check_metric(self, name: str) -> None:
        """Refuse a field that no line of the runs has, as soon as there is a line of training and an evaluation."""
        lines = [line for run in self.runs.values() for line in run.tail.lines]
        known = sorted(
            {field for line in lines for field, value in flatten_metrics(line).items() if type(value) in (int, float)}
        )
        if {line["kind"] for line in lines} >= {"train", "eval"} and name not in ("loss", "score", *known):
            raise MixerError(f"report --watch: no run has the metric {name!r}; {nearest(name, ['score', *known])}.")


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run directories in a folder, or the folder itself if it is one.

    Hidden folders, which include those that a run is being created in, are left out.
    """
    top, found = len(folder.parts), 0
    for here, inner, files in os.walk(folder):
        if "config.json" in files and "metrics.jsonl" in files:
            yield Path(here)
            found += 1
            inner.clear()
        elif len(Path(here).parts) - top >= DEPTH:
            inner.clear()
        else:
            inner[:] = [name for name in inner if not name.startswith(".")]
    if not found and (folder / "config.json").is_file():  # of a run whose metrics are gone
        yield folder


def _config(path: Path) -> Record:
    try:
        check_own(path, path.parent)
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as why:
        raise MixerError(f"{path.name} is not readable JSON ({why})") from None
    if not isinstance(found, dict) or not all(isinstance(found.get(part, {}), dict) for part in ("model", "data")):
        raise MixerError(f"{path.name} is not the config of a run")
    return found


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and value > 0 else None
