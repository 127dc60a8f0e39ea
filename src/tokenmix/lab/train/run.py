"""A run directory that any training loop can write, so that report and watch serve loops that are not ours."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from ...system.files import check_free, whole_folder, write_json
from ...types import Record
from .rundir import RunDir, environment, plain_numbers


class Run:
    """Write what a training loop logs into a run directory, for `tokenmix report` and its --watch.

    Use it in a ``with`` block: while the block is open, the run counts as running; an error inside is recorded.

    Args:
        out: the directory to create; with ``after``, that of a run that goes on.
        config: anything that JSON holds and the report may show: sizes, rates, the name of the data.
        steps: how many steps the loop makes, for the time left; None: unknown.
        score: the number of ``eval`` that the run is judged by.
        higher: whether a higher score is better.
        after: the step after which the loop goes on; lines after it are dropped. 0: a new run.

    Raises:
        MixerError: if the directory exists for a new run, if it is none for one that goes on, or if another process
            writes there.
    """

    def __init__(
        self,
        out: Path | str,
        *,
        config: Record | None = None,
        steps: int | None = None,
        score: str = "loss",
        higher: bool = False,
        after: int = 0,
    ):
        if after:
            self._dir = RunDir.open(out)
        else:
            check_free(out)
            marks = {"metric": score, "label": score.replace("_", " "), "higher": higher}
            env = environment({"score": marks}, torch.device("cpu"))
            with whole_folder(Path(out)) as temporary:
                fields = {"data": {"kind": "own"}, "train": {"steps": steps}}
                write_json(temporary / "config.json", fields | (config or {}))
                write_json(temporary / "env.json", env)
                (temporary / "metrics.jsonl").touch()
            self._dir = RunDir(out)
        self._after, self._began = after, 0.0
        self._stack = contextlib.ExitStack()

    def _seconds(self) -> float:
        """Return the seconds that the lines so far took."""
        return float(max((line.get("seconds", 0.0) for line in self._dir.read_metrics()), default=0.0))

    def __enter__(self) -> Self:
        self._stack.enter_context(self._dir.lock())
        if self._after:
            self._dir.cut_metrics(self._after)
        self._began = time.perf_counter() - self._seconds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, why, trace)

    def log(self, step: int, *, loss: float, **numbers: float) -> None:
        """Add a line of training: its loss and any other numbers, such as the rate."""
        self._append({"kind": "train", "step": step, "loss": loss} | numbers)

    def eval(self, step: int, split: str = "valid", **scores: float) -> None:
        """Add a line of an evaluation with its scores."""
        self._append({"kind": "eval", "split": split, "step": step} | scores)

    def _append(self, line: Record) -> None:
        self._dir.append({"seconds": round(time.perf_counter() - self._began, 3)} | plain_numbers(line))
