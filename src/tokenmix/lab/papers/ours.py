"""Our values: computed anew, or as recorded in ``ours.json``, which `make tables` writes and a test computes again.

What small models say of a claim is read from the results of sweeps.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..sweep.evidence import compare, plural
from ..sweep.plan import SweepPlan
from ..sweep.results import Results
from .claim import CONFIRMED, CONTRADICTED, NO_DIFFERENCE, TOO_LARGE, Claim, Paper, Trial, Value

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
    results = measured_sweep(trial.sweep)
    if results is None:
        return None
    if not results.scores(trial.row).keys() & results.scores(trial.against).keys():
        return Outcome(TOO_LARGE, "not run")
    found = compare(results, trial.row, trial.against)
    margin = f" ± {found.margin:.3f}" if found.margin is not None else ""
    text = f"{found.difference:+.3f}{margin} {results.metric()}, {plural(found.n, 'seed')}"
    if found.verdict in ("better", "worse"):
        return Outcome(CONFIRMED if found.verdict == trial.claimed else CONTRADICTED, text)
    if found.verdict == "no difference":
        return Outcome(NO_DIFFERENCE, text)
    return Outcome(TOO_LARGE, f"{text} ({'; '.join(found.why)})")


def outcomes(claim: Claim) -> list[tuple[Trial, Outcome]]:
    """Return what each trial of a claim has found; outside of a checkout none."""
    return [(trial, outcome) for trial in claim.trials if (outcome := decide_trial(trial)) is not None]


def count_verdicts(paper: Paper) -> Counter[str]:
    """Count the verdicts of a paper's trials."""
    return Counter(outcome.verdict for claim in paper.claims for _, outcome in outcomes(claim))


def write(papers: tuple[Paper, ...], file: Path = RECORD) -> dict[str, dict[str, Value]]:
    """Compute every value and write the record."""
    found = {paper.key: compute_values(paper) for paper in papers}
    file.write_text(json.dumps(found, indent=1) + "\n")
    _record.cache_clear()
    return found
