"""Carry out a plan: a queue of runs over several processes, which can be stopped at any time and gone on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ...errors import MixerError
from ...system.files import whole_file, write_json
from ...system.lock import hold_lock
from ...system.machine import cpu_name, memory_available, pick_device
from ...system.text import size
from ..train import RunConfig
from ..train.stopping import asked_to_stop
from ..train.tasks import open_task
from .modules import load_modules
from .plan import Job, Jobs, SweepPlan, check_plan, run_key
from .results import Record, Results, markdown, results_table

RESULTS = "results.json"
TABLE = "table.md"
PAGE = "sweep.html"
FLOOR = "constant predictor"
POLL = 0.2
RELOAD = 10
"""Seconds after which a browser loads the page of a sweep in progress again."""
SHARE = 5.0
"""The least time between two pages, as a multiple of what writing one takes."""

Tell = Callable[[str], None]


@dataclass
class Running:
    """A job in a process of its own."""

    job: Job
    process: subprocess.Popen
    outcome: Path
    slot: int


def sweep(
    plan: SweepPlan | None,
    out: Path | str,
    *,
    processes: int = 1,
    threads: int = 1,
    results: Path | str | None = None,
    init: Path | str | None = None,
    tell: Tell = lambda line: None,
) -> Results:
    """Run a plan into the folder ``out`` and return its results.

    Called again after an interruption, it goes on: finished runs are in the results file, unfinished ones continue from
    their last checkpoint. Runs whose folders are gone but whose records are in the file are not repeated.

    Args:
        plan: the experiment; None: that of an earlier sweep in ``out``.
        out: folder of the runs, ``results.json``, ``table.md``, ``curves.png`` and the page ``sweep.html``, which are
            written again after every run.
        processes: runs at a time.
        threads: CPU threads of each run. Runs side by side stay on cores of their own; a single one on none, as other
            sweeps may run beside it.
        results: results file, if it is kept elsewhere than in ``out``. Several sweeps may write to it at once, each
            with some of the rows and seeds of a plan.
        init: folder of another sweep; each run starts from the weights of that sweep's final run of the same row. A
            plan with ``init`` needs it, any other refuses it.
        tell: called with a line about each finished run.

    Raises:
        MixerError: for a plan that cannot run, if the runs would not fit into memory together, or if one fails for
            another reason than divergence.
    """
    out = Path(out)
    file, shared = (out / RESULTS, False) if results is None else (Path(results), True)
    found = Results.open(file, plan, shared=shared)
    plan = found.plan
    load_modules(plan.files())
    jobs = Jobs(plan, threads, None if init is None else Path(init))
    check_plan(jobs, processes)
    out.mkdir(parents=True, exist_ok=True)
    with hold_lock(out, f"sweep: another sweep is running in {out}; wait until it ends, or give another --out."):
        found = Results.open(file, plan, shared=shared)  # again, as another sweep may have ended in between
        queue = Queue(found, out, jobs, processes, tell)
        found.machine = found.machine or {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": threads}
        if not found.yardsticks:
            found.yardsticks = yardsticks(jobs.config(next(iter(plan.rows))))
        found.save()
        queue.check_memory()
        queue.work()
    return found


def yardsticks(config: RunConfig) -> dict[str, float]:
    """Return the floors of a config: scores on the part of validation that models are scored on, without learning.

    They are that of the predictor that reads nothing, in every task, and that of gzip on the bytes of a text.
    """
    task = open_task(config)
    return {FLOOR: round(task.floor(), 4), **task.yardsticks()}


class Queue:
    """The runs of a sweep that remain, and those in progress."""

    def __init__(self, found: Results, out: Path, jobs: Jobs, processes: int, tell: Tell):
        self.found, self.plan, self.out = found, found.plan, out
        self.jobs, self.processes, self.tell = jobs, processes, tell
        self.running: list[Running] = []
        self.stale, self.due = True, 0.0  # of the curves and the page

    def remaining_jobs(self) -> Iterator[Job]:
        """Yield the runs that could start now: each row's rates and its first seed, then the other seeds of all rows.

        A sweep that is stopped early then has rows to compare, over the same seeds. The rates of a row run one after
        another, as the later ones are held against the earlier ones.
        """
        busy = {(r.job.phase, r.job.row) for r in self.running}
        active = {r.job.key for r in self.running}
        for seed in self.plan.seeds:
            for row in self.plan.rows:
                done = {r["rate"] for r in self.found.of("tune", row)}
                open_rates = [rate for rate in middle_first(self.plan.rates) if rate not in done]
                if open_rates and self.plan.tries_rates():
                    if ("tune", row) not in busy:
                        yield self.jobs.tune(row, open_rates[0])
                    continue
                for rate in self.final_rates(row, seed) if self.plan.tries_rates() else self.plan.rates:
                    if run_key("final", row, rate, seed) not in self.found.runs.keys() | active:
                        yield self.jobs.final(row, rate, seed, self.final_steps(row))

    def final_rates(self, row: str, seed: int) -> list[float]:
        """Return the rates of a row's final runs with a seed: those to confirm with the first, then the best."""
        best = self.found.best_rate(row)
        assert best is not None  # every rate was tried
        if seed == self.plan.seeds[0]:
            return self.found.leading_rates(row)
        return [best] if self.found.is_confirmed(row) else []

    def final_steps(self, row: str) -> int:
        """Return the steps of a row's final runs."""
        if self.plan.equal == "tokens":
            return self.jobs.steps(row)
        per_step = median(r["seconds"] / r["steps"] for r in self.found.of("tune", row) if r["steps"])
        return max(2, int((self.plan.seconds or 0) / per_step))

    def limits(self, job: Job) -> dict[int, float]:
        """Return the worst score at each step with which a tuning run goes on."""
        best: dict[int, float] = {}
        if job.phase == "final" or self.plan.hopeless is None:
            return best
        higher = self.found.higher_is_better()
        steps = job.config.train.steps or 0
        for record in self.found.of("tune", job.row):
            per_step = record["tokens"] // max(record["steps"], 1)
            for tokens, score, _ in record["curve"] if record["score"] is not None else []:
                step = tokens // max(per_step, 1)
                if step < steps:
                    known = best.get(step)
                    best[step] = score if known is None else (max if higher else min)(known, score)
        slack = self.plan.hopeless
        return {step: score * (1 - slack if higher else 1 + slack) for step, score in best.items()}

    def work(self) -> None:
        """Run everything that remains. SIGTERM, like an error, lets the runs in progress save their step first."""
        try:
            with asked_to_stop() as asked:
                while not asked():
                    while len(self.running) < self.processes:
                        job = next(self.remaining_jobs(), None)
                        if job is None:
                            break
                        self.running.append(self.start(job))
                    if not self.running:
                        return
                    if self.stale and time.monotonic() >= self.due:  # after the start, which need not wait for pictures
                        self.draw(going_on=True)
                    time.sleep(POLL)
                    for each in [r for r in self.running if r.process.poll() is not None]:
                        self.running.remove(each)
                        self.finish(each)
            self.tell("stopped by SIGTERM; the same command goes on from here")
            raise SystemExit(128 + signal.SIGTERM)
        finally:
            for each in self.running:
                each.process.terminate()
            for each in self.running:
                each.process.wait()
            self.running.clear()
            self.write_table()
            self.draw(going_on=False)

    def write_table(self) -> None:
        """Write the table."""
        with whole_file(self.out / TABLE) as file:
            file.write(markdown(results_table(self.found)).encode())

    def draw(self, *, going_on: bool) -> None:
        """Write the curves and the page, where the extra "plot" is installed."""
        began = time.monotonic()
        try:
            from .curves import draw_curves
            from .sweep_page import write_sweep_page
        except ImportError:
            return
        draw_curves(self.found, self.out / "curves.png")
        jobs = [each.job for each in self.running]
        write_sweep_page(self.found, jobs, self.out / PAGE, refresh=RELOAD if going_on else None)
        self.stale, self.due = False, time.monotonic() + SHARE * (time.monotonic() - began)

    def start(self, job: Job) -> Running:
        """Start a job in a free slot."""
        slot = next(i for i in range(self.processes) if i not in {r.slot for r in self.running})
        process, outcome = self.spawn(job, slot, probe=False)
        return Running(job, process, outcome, slot)

    def spawn(self, job: Job, slot: int, *, probe: bool) -> tuple[subprocess.Popen, Path]:
        """Start the process of a job; return it and the file that its outcome will be in."""
        folder = self.out / ("probe" if probe else "runs") / job.key
        jobs = self.out / "jobs"
        jobs.mkdir(exist_ok=True)
        name = job.key.replace("/", "__") + ("__probe" if probe else "")
        outcome = jobs / f"{name}.outcome.json"
        outcome.unlink(missing_ok=True)
        write_json(
            jobs / f"{name}.json",
            {
                "parent": os.getpid(),
                "run": str(folder.resolve()),
                "outcome": str(outcome.resolve()),
                "config": job.config.to_json(),
                "cores": slot_cores(slot, self.jobs.threads) if self.processes > 1 else [],
                "limits": {} if probe else self.limits(job),
                "test_bytes": self.plan.test_bytes if job.phase == "final" else None,
                "lengths": self.plan.lengths if job.phase == "final" else (),
                "final": job.phase == "final",
                "probe": probe,
                "modules": [str(Path(file).resolve()) for file in self.plan.files()],
            },
        )
        env = os.environ | {"OMP_NUM_THREADS": str(self.jobs.threads)}
        with (jobs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tokenmix.lab.sweep.worker", str(jobs / f"{name}.json")],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=env,
            ), outcome

    def finish(self, each: Running) -> None:
        """Record a run that has ended."""
        outcome = self.outcome_of(each.process, each.outcome, each.job)
        if outcome.get("diverged"):
            why, peak = outcome["error"], outcome["peak_mib"]
            outcome = {"score": None, "diverged": why, "steps": 0, "tokens": 0, "curve": [], "seconds": 0.0}
            outcome |= {"peak_mib": peak, "metric": "score", "parameters": None}
        self.found.add(each.job, outcome)
        self.write_table()
        self.stale = True
        done, what = self.found.done(), "diverged"
        if outcome["score"] is not None:
            what = f"{outcome['score']:.4f} after {outcome['steps']:,} steps, {outcome['seconds']:.0f} s"
            what += ", given up" if outcome["stopped"] else ""
        self.tell(f"[{done}/{self.plan.total()}] {each.job.key}: {what}")

    def outcome_of(self, process: subprocess.Popen, outcome: Path, job: Job) -> Record:
        """Return a worker's outcome; a failure other than divergence ends the sweep."""
        if not outcome.exists():
            log = self.out / "jobs" / (outcome.name.removesuffix(".outcome.json") + ".log")
            last = (log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
            ended = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
            raise MixerError(f"sweep: {job.key} ended with {ended} ({last}); the same command goes on from here.")
        found = json.loads(outcome.read_text())
        if "error" in found and not found.get("diverged"):
            raise MixerError(f"sweep: {job.key}: {found['error']}")
        return found

    def check_memory(self) -> None:
        """Measure the peak memory of each row in a short trial, and refuse more processes than fit.

        A single process has no trial: where it does not fit, the trial would not either.
        """
        if self.processes == 1:
            return
        peaks = {}
        for row in self.plan.rows:
            if any(r["row"] == row for r in self.found.runs.values()):
                peaks[row] = max(r["peak_mib"] for r in self.found.runs.values() if r["row"] == row)
                continue
            job = self.jobs.tune(row, self.plan.rates[0], 2)
            shutil.rmtree(self.out / "probe", ignore_errors=True)
            process, outcome = self.spawn(job, 0, probe=True)
            try:
                process.wait()
            finally:
                process.terminate()
            peaks[row] = self.outcome_of(process, outcome, job)["peak_mib"]
        shutil.rmtree(self.out / "probe", ignore_errors=True)
        together = (
            sum(sorted(peaks.values(), reverse=True)[: self.processes])
            if self.processes <= len(peaks)
            else (max(peaks.values()) * self.processes)
        )
        free = memory_available(pick_device(self.jobs.config(next(iter(self.plan.rows))).train.device).type)
        if free is not None and together * 2**20 > free:
            raise MixerError(
                f"sweep: {self.processes} processes need {size(together * 2**20)} by their measured peaks, and "
                + f"{size(free)} are free; give fewer --processes."
            )


def middle_first(rates: tuple[float, ...]) -> list[float]:
    """Return the rates from the middle one outwards, as it is the most likely to be good."""
    ordered = sorted(rates)
    middle = (len(ordered) - 1) / 2
    return sorted(ordered, key=lambda rate: abs(ordered.index(rate) - middle))


def slot_cores(slot: int, threads: int) -> list[int]:
    """Return the cores of a slot; none if the machine has too few for each slot to have its own."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return cores[slot * threads : (slot + 1) * threads] if (slot + 1) * threads <= len(cores) else []
