"""The question that a report answers, and what its scores leave open."""

from __future__ import annotations

import json
import math

from .runs import UNITS, Run

FEW = {"bytes": 100_000}
"""Amounts of data below which a caution names them; of all other units it is ``FEW_EXAMPLES``."""
FEW_EXAMPLES = 2_000
NORMAL = 1.96
"""The 97.5 % quantile of the normal distribution."""
MOST_NAMES = 4


def question(runs: list[Run]) -> str:
    """Return the question that a page about these runs answers, which is its title."""
    if len(runs) == 1:
        return f"What did {runs[0].name} learn?"
    names = ", ".join(run.name for run in runs) if len(runs) <= MOST_NAMES else f"{len(runs)} runs"
    return f"Which is best: {names}?"


def cautions(runs: list[Run]) -> list[str]:
    """Say what the scores of these runs leave open: scores of one seed each, and of few examples."""
    return [*_of_seeds(runs), *_of_examples(runs)]


def _of_seeds(runs: list[Run]) -> list[str]:
    experiments = [_without_seed(run) for run in runs]
    if len(runs) < 2 or len(set(experiments)) < len(runs):
        return []
    return [
        "Caution: each of these was trained once. With another seed its score would be another one; `tokenmix sweep` "
        "repeats them with several seeds and says which differences remain."
    ]


def _without_seed(run: Run) -> str:
    loop = run.config.get("train")
    train = {k: v for k, v in loop.items() if k != "seed"} if isinstance(loop, dict) else loop
    return json.dumps({**run.config, "train": train}, sort_keys=True, default=str)


def _of_examples(runs: list[Run]) -> list[str]:
    found: dict[str, list[str]] = {}
    for run in runs:
        line = run.score_line("valid") or {}
        unit, n = next(((u, line[u]) for u in UNITS if isinstance(line.get(u), int)), ("", 0))
        if not 0 < n < FEW.get(unit, FEW_EXAMPLES):
            continue
        share = line[run.metric.name]
        chance = NORMAL * math.sqrt(share * (1 - share) / n) if run.metric.accuracy and 0 <= share <= 1 else 0.0
        moves = f", of which chance alone moves a share by {100 * chance:.1f} points either way" if chance else ""
        found.setdefault(f"{n:,} {unit}{moves}", []).append(run.name)
    return [f"Caution: the score of {', '.join(names)} is of only {what}." for what, names in found.items()]
