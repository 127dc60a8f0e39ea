"""One run of a sweep in a process of its own: ``python -m tokenmix.lab.sweep.worker JOB.json``.

The outcome goes into the file beside the job, whole or not at all. The process ends with the one that started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch

from ...errors import MixerError
from ...models import build_model
from ...system.config import dotted_fields
from ...system.files import write_json
from ...system.machine import cpu_name, peak_mib, pick_device
from ...types import Record
from ..train import RunConfig, evaluate_run, resume, train
from ..train.loop import Diverged
from ..train.rundir import RunDir
from ..train.tasks import task_of
from ..train.text_task import streaming_cost
from .modules import load_modules

WATCHED = 1.0
"""Seconds between two looks at whether the parent still lives."""


def main(path: str) -> int:
    """Carry out the job of a file and write its outcome."""
    job = json.loads(Path(path).read_text())
    _end_with_parent(job["parent"])
    if job.get("cores") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, job["cores"])
    load_modules(job["modules"])
    config = RunConfig.from_json(job["config"])
    torch.set_num_threads(config.train.threads or 1)
    try:
        outcome = probe(config, Path(job["run"])) if job["probe"] else run(config, Path(job["run"]), job)
    except MixerError as why:
        peak = peak_mib(torch.device("cpu"))  # which a trial is run for, even if its rate is one that diverges
        outcome = {"error": str(why), "diverged": isinstance(why, Diverged), "peak_mib": peak}
    write_json(Path(job["outcome"]), outcome)
    return 0


def run(config: RunConfig, folder: Path, job: Record) -> Record:
    """Train from wherever the run stands, and return its record."""
    limits = {int(step): limit for step, limit in job["limits"].items()}
    began = time.process_time()
    if folder.exists():
        check_same_run(config, folder)
        summary = resume(folder, limits=limits, verbose=False)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        summary = train(config, folder, limits=limits, verbose=False)
    found = record(config, folder, summary, time.process_time() - began)
    task, lengths, test_bytes = task_of(config), tuple(job["lengths"]), job["test_bytes"]
    evaluate = partial(evaluate_run, folder, device=config.train.device, record=False)
    if job["final"]:
        found |= task.score_test_split(evaluate, test_bytes)
    if lengths:
        found |= task.score_lengths(config, lengths, evaluate, test_bytes)
    length = task.streams(config) if job["final"] else None
    if length is None:
        return found
    model = build_model(config.model)  # type: ignore[arg-type]  # no OwnModel: a sweep takes no objects
    return found | {"state_bytes": streaming_cost(model, length).get("state_bytes_per_row")}


def check_same_run(config: RunConfig, folder: Path) -> None:
    """Refuse to go on with a run of another config, such as that of a sweep whose results were deleted.

    Where the data lies and the number of threads may differ.
    """
    now, then = (dotted_fields(each.to_json()) for each in (config, RunDir.open(folder).config()))
    changed = [
        f"{name} was {then.get(name)!r}, is {value!r}"
        for name, value in now.items()
        if value != then.get(name) and name not in ("data.path", "train.threads")
    ]
    if changed:
        raise MixerError(
            f"{folder} holds a run of another sweep ({'; '.join(changed)}); delete it, or give another --out."
        )


def record(config: RunConfig, folder: Path, summary: Record, cpu_seconds: float) -> Record:
    """Return what the results keep of a run."""
    opened = RunDir.open(folder)
    task = task_of(config)
    metric, unit = task.metric, task.unit
    per_step = summary[unit] // max(summary["step"], 1)
    metrics = opened.read_metrics()
    times = [(line["step"], line["seconds"]) for line in metrics if line["kind"] == "train"]
    evals = [line for line in metrics if line["kind"] == "eval" and line["split"] == "valid"]
    return {
        "metric": metric,
        "higher": task.higher,
        "score": summary[f"valid_{metric}"],
        "steps": summary["step"],
        "stopped": summary["step"] < (config.train.steps or 0),
        "tokens": summary[unit],
        "unit": unit,
        "seconds": summary["seconds"],
        "cpu_seconds": round(cpu_seconds, 1),
        "peak_mib": summary["peak_mib"],
        "cpu": cpu_name(),
        "device": opened.env()["device"],
        "parameters": opened.env()["parameters"],
        "curve": [
            [
                e["step"] * per_step,
                round(e[metric], 5),
                max((s for step, s in times if step <= e["step"]), default=None),
            ]
            for e in evals
        ],
    }


def probe(config: RunConfig, folder: Path) -> Record:
    """Train two steps and evaluate once, to measure memory and speed."""
    on_gpu = pick_device(config.train.device).type == "cuda"
    changes = {"train.steps": 2, "train.eval_every": 2, "train.save_every": 2, "optim.warmup": 0, "train.log_every": 1}
    summary = train(config.override(changes | task_of(config).trial(config)), folder, verbose=False)
    lines = [line for line in RunDir.open(folder).read_metrics() if line["kind"] == "train"]
    return {
        "peak_mib": max(summary["peak_mib"], 0.0 if on_gpu else peak_mib(torch.device("cpu"))),
        "step_seconds": lines[-1]["seconds"] - lines[-2]["seconds"],
    }


def _end_with_parent(parent: int) -> None:
    """End this process when the sweep that started it has ended, as it may have while torch was being imported."""
    if os.name == "nt":  # there a virtual environment's Python is started by a process in between
        parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCHED)
        os._exit(1)

    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
