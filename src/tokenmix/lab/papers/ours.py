"""Our values: computed anew, or as recorded in ``ours.json``, which `make tables` writes and a test computes again.

What small models say of a claim is read from the results of sweeps.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch

from ...types import Record
from ..sweep.evidence import LEAST_SEEDS, compare, plural, student
from ..sweep.plan import SweepPlan
from ..sweep.results import Results
from .claim import CONFIRMED, CONTRADICTED, MEASURES, NO_DIFFERENCE, UNTESTABLE, Claim, Paper, Trial, Value

RECORD = Path(__file__).parent / "ours.json"
BENCHMARKS = Path(__file__).resolve().parents[4] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@cache
def _record() -> dict[str, dict[str, Value]]:
    found: dict[str, dict[str, Value]] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return found


def recorded_values(paper: Paper) -> dict[str, Value]:
    """Return our recorded values of a paper's numbers, by "section: name"."""
    return _record().get(paper.key, {})


def compute_values(paper: Paper, claims: tuple[Claim, ...] | None = None) -> dict[str, Value]:
    """Compute our values of a paper's numbers, or of some of its claims. Torch's generator is left as it was."""
    found: dict[str, Value] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for claim in paper.claims if claims is None else claims:
            for number in claim.numbers:
                if number.compute:
                    found[f"{claim.section}: {number.name}"] = _round_value(number.function(**number.args))
    return found


def _round_value(value: Value) -> Value:
    """Round a value to nine digits, so that a record does not depend on the machine's last bit."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


def measured_elsewhere(result: str) -> float | None:
    """Look up a value of a file in ``benchmarks/results``: "file.json:key/key"; None outside of a checkout."""
    name, _, keys = result.partition(":")
    if not (RESULTS / name).is_file():
        return None
    found: Any = json.loads((RESULTS / name).read_text())
    for key in keys.split("/"):
        found = found[key]
    return float(found)


class Outcome(NamedTuple):
    """What a trial has found.

    Attributes:
        verdict: one of the first four of ``VERDICTS``.
        found: the difference with its margin and seeds, or why there is none.
    """

    verdict: str
    found: str


def measured_sweep(name: str) -> Results | None:
    """Return what the project's plan of this name has found so far; None outside of a checkout."""
    file = BENCHMARKS / "sweeps" / f"{name}.json"
    if not file.is_file():
        return None
    return Results.open(RESULTS / file.name, SweepPlan.from_json(json.loads(file.read_text())))


def decide_trial(trial: Trial) -> Outcome | None:
    """Decide a trial from the results in ``benchmarks/results``; None outside of a checkout."""
    if trial.claimed in MEASURES:
        return _decide_direction(trial)
    results = measured_sweep(trial.sweep)
    if results is None:
        return None
    if not results.scores(trial.row).keys() & results.scores(trial.against).keys():
        return Outcome(UNTESTABLE, "not run")
    if trial.after < 1:
        results = _score_early(results, trial.after)
    found = compare(results, trial.row, trial.against)
    margin = f" ± {found.margin:.3f}" if found.margin is not None else ""
    text = f"{found.difference:+.3f}{margin} {results.metric()}, {plural(found.n, 'seed')}"
    if found.verdict in ("better", "worse"):
        return Outcome(CONFIRMED if found.verdict == trial.claimed else CONTRADICTED, text)
    if found.verdict == "no difference":
        return Outcome(NO_DIFFERENCE, text)
    return Outcome(UNTESTABLE, f"{text} ({'; '.join(found.why)})")


def _score_early(results: Results, share: float) -> Results:
    """Return the results with the final runs scored as they were after a share of their training."""
    early = {
        key: run | {"score": [score for tokens, score, _ in run["curve"] if tokens <= share * run["tokens"]][-1]}
        for key, run in results.runs.items()
        if run["phase"] == "final" and run["score"] is not None
    }
    return replace(results, runs=results.runs | early)


def _decide_direction(trial: Trial) -> Outcome | None:
    """Decide which of two rows has less: the 95 % interval of their ratio, repeat by repeat, must leave 1 out."""
    file = RESULTS / f"{trial.sweep}.json"
    if not file.is_file():
        return None
    found, (unit, sign) = json.loads(file.read_text()), MEASURES[trial.claimed]
    rows, unit = found["rows"], unit or found["metric"]
    if not rows.keys() >= {trial.row, trial.against}:
        return Outcome(UNTESTABLE, "not run")
    logs = [log(a / b) for a, b in zip(rows[trial.row][unit], rows[trial.against][unit], strict=True)]
    text, n = f"{exp(mean(logs)):.2f} times the {unit}", plural(len(logs), "repeat" if trial.is_measured else "seed")
    if len(logs) < LEAST_SEEDS:
        return Outcome(UNTESTABLE, f"{text}, {n}, needs {LEAST_SEEDS}")
    margin = student(len(logs)) * stdev(logs) / len(logs) ** 0.5
    low, high = (exp(mean(logs) + side * margin) for side in (-1, 1))
    text = f"{text} ({low:.2f} to {high:.2f}), {n}"
    if abs(mean(logs)) <= margin:
        return Outcome(NO_DIFFERENCE, text)
    return Outcome(CONFIRMED if mean(logs) * sign > 0 else CONTRADICTED, text)


def training_minutes(trial: Trial) -> float | None:
    """Return the processor time that both rows of a trial took, tuning included; None if one was not trained."""
    results = None if trial.is_measured else measured_sweep(trial.sweep)
    if results is None or not results.finals(trial.row) or not results.finals(trial.against):
        return None
    runs = (run for run in results.runs.values() if run["row"] in (trial.row, trial.against))
    return sum(run.get("cpu_seconds", 0.0) for run in runs) / 60


def drawn_again() -> list[Record]:
    """Return the verdicts that were drawn by lot, with "word" once trained again; outside of a checkout none."""
    file = RESULTS / "lots.json"
    found: list[Record] = json.loads(file.read_text())["lots"] if file.is_file() else []
    return found


def outcomes(claim: Claim) -> list[tuple[Trial, Outcome]]:
    """Return what each trial of a claim has found; outside of a checkout none."""
    return [(trial, outcome) for trial in claim.trials if (outcome := decide_trial(trial)) is not None]


def count_verdicts(paper: Paper, *, measured: bool = False) -> Counter[str]:
    """Count the verdicts of a paper's trials of trained models, or of those of time and memory."""
    found = (each for claim in paper.claims for each in outcomes(claim))
    return Counter(outcome.verdict for trial, outcome in found if trial.is_measured == measured)


def write(papers: tuple[Paper, ...], file: Path = RECORD) -> dict[str, dict[str, Value]]:
    """Compute every value and write the record."""
    found = {paper.key: compute_values(paper) for paper in papers}
    file.write_text(json.dumps(found, indent=1) + "\n")
    _record.cache_clear()
    return found
