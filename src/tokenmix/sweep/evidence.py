"""Hold a sweep to the protocol of claims about quality (docs/evidence.md)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, stdev

from ..errors import MixerError
from ..system.config import nearest
from .results import Results

LEAST_RATES, LEAST_SEEDS = 3, 3
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""The 97.5 % quantile of Student's t distribution by number of values."""


@dataclass(frozen=True)
class Comparison:
    """One row against another.

    Attributes:
        difference: mean over the paired seeds of the score of the first minus that of the second.
        margin: half the width of its 95 % interval; None for one seed.
        n: paired seeds.
        verdict: "better", "worse", "no difference" or "cannot be tested", of the first row.
        why: what the protocol asks for and this sweep lacks; empty if nothing.
    """

    difference: float
    margin: float | None
    n: int
    verdict: str
    why: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the comparison as one line."""
        margin = "one seed, indicative" if self.margin is None else f"+- {self.margin:.3f}, {plural(self.n, 'seed')}"
        reasons = f" ({'; '.join(self.why)})" if self.why else ""
        return f"{self.verdict}: {self.difference:+.3f} {margin}{reasons}"


def plural(n: int, thing: str) -> str:
    """Write a number of things: "1 seed", "3 seeds"."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def shortcomings(results: Results, *rows: str) -> list[str]:
    """List what the protocol asks for and these rows lack, one line each; empty if a verdict may be given.

    Args:
        rows: names of rows; none: all of the plan.
    """
    found, plan = [], results.plan
    for row in rows or tuple(plan.rows):
        if row not in plan.rows:
            raise MixerError(f"evidence: there is no row {row!r}; {nearest(row, plan.rows)}.")
        scores, tuned = results.scores(row), {r["rate"] for r in results.of("tune", row)}
        if len(tuned) < LEAST_RATES:
            found.append(f"{row}: tuned over {plural(len(tuned), 'rate')}, needs {LEAST_RATES}")
        if len(scores) < LEAST_SEEDS:
            found.append(f"{row}: {plural(len(scores), 'seed')}, needs {LEAST_SEEDS}")
        for name, value in results.yardsticks.items():
            if scores and mean(scores.values()) > value and not results.higher_is_better():
                found.append(f"{row}: worse than {name} ({mean(scores.values()):.3f} against {value:.3f})")
    if plan.shell is None:
        found.append("the plan names no shell")
    return found


def compare(results: Results, first: str, second: str) -> Comparison:
    """Compare two rows over the seeds that both have.

    Without shortcomings, a difference is one if its 95 % interval (Student's t on the paired differences) leaves 0 out.

    Raises:
        MixerError: if the rows have no seed in common.
    """
    lacks = tuple(shortcomings(results, first, second))
    a, b = results.scores(first), results.scores(second)
    paired = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    if not paired:
        raise MixerError(f"evidence: rows {first!r} and {second!r} have no finished seed in common.")
    n = len(paired)
    margin = None if n < 2 else STUDENT.get(n, 2.0) * stdev(paired) / n**0.5
    if lacks:
        return Comparison(mean(paired), margin, n, "cannot be tested", lacks)
    if margin is None or abs(mean(paired)) <= margin:
        return Comparison(mean(paired), margin, n, "no difference")
    better = (mean(paired) > 0) == results.higher_is_better()
    return Comparison(mean(paired), margin, n, "better" if better else "worse")
