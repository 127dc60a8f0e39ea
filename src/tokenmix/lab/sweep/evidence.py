"""Hold a sweep to the protocol of claims about quality (docs/evidence.md)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, stdev

from ...errors import MixerError
from ...system.config import nearest
from ...types import Record
from ..train.registry import TASKS, all_tasks
from .results import Results

LEAST_RATES, LEAST_SEEDS = 3, 3
LEARNED = 0.95
"""Share of right answers at the lengths of training from which on answers at longer ones say something of a row."""
STUDENT = {2: 12.7062, 3: 4.3027, 4: 3.1824, 5: 2.7764, 6: 2.5706, 7: 2.4469, 8: 2.3646, 9: 2.3060, 10: 2.2622}
"""The 97.5 % quantile of Student's t distribution by number of values; ``student`` knows it for more of them."""
NORMAL = 1.959964
"""That of the normal distribution."""


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


def student(n: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution for n values, to three decimals."""
    if n in STUDENT:
        return STUDENT[n]
    z, v = NORMAL, n - 1  # Cornish-Fisher's series in 1 / v
    one, two, three = z**3 + z, 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    return z + one / (4 * v) + two / (96 * v**2) + three / (384 * v**3)


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
        elif untried := [f"{rate:g}" for rate in plan.rates if rate not in tuned]:
            found.append(f"{row}: not tried yet at {', '.join(untried)}")
        if len(scores) < LEAST_SEEDS:
            found.append(f"{row}: {plural(len(scores), 'seed')}, needs {LEAST_SEEDS}")
        # The mean leaves such seeds out, which makes the row look better than it is.
        if diverged := [str(r["seed"]) for r in results.finals(row) if r["score"] is None]:
            found.append(f"{row}: diverged with seed {', '.join(diverged)}")
        found += _list_unlearned(results, row)
    if not results.yardsticks:
        found.append("the results hold no floor, the score of a predictor that reads nothing")
    if plan.shell is None:
        found.append("the plan names no shell")
    return found


def _list_unlearned(results: Results, row: str) -> list[str]:
    """List the floors that a row is not above, and lengths of training that it has not learned.

    Its scores are those at the lengths of training, whatever the rows are compared by. They are above a floor if their
    mean is by more than their spread leaves open: by the 95 % interval of the mean.
    """
    trained, higher = [r["score"] for r in results.finals(row) if r["score"] is not None], results.higher_is_better()
    if not trained:
        return []
    sure = student(len(trained)) * stdev(trained) / len(trained) ** 0.5 if len(trained) > 1 else 0.0
    found, reached = [], mean(trained)
    for name, value in results.yardsticks.items():
        above = reached - value if higher else value - reached
        if above <= sure:
            score = f"{reached:.3f} +- {sure:.3f}" if above > 0 else f"{reached:.3f}"
            found.append(f"{row}: not above the floor ({score} against {value:.3f} of {name})")
    if results.plan.lengths and higher and reached < LEARNED:
        found.append(f"{row}: has not learned the lengths of its training ({reached:.3f} right, needs {LEARNED})")
    return found


def compare(results: Results, first: str, second: str) -> Comparison:
    """Compare two rows over the seeds that both have.

    Without shortcomings, a difference is one if its 95 % interval (Student's t on the paired differences) leaves 0 out.

    Raises:
        MixerError: if the rows are one, or have no seed in common.
    """
    if first == second:
        raise MixerError(f"evidence: row {first!r} cannot be compared with itself.")
    lacks = shortcomings(results, first, second)
    a, b = results.scores(first), results.scores(second)
    paired = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    if not paired:
        raise MixerError(f"evidence: rows {first!r} and {second!r} have no finished seed in common.")
    n = len(paired)
    margin = None if n < 2 else student(n) * stdev(paired) / n**0.5
    lacks += _list_differences(results, first, second)
    if n < LEAST_SEEDS <= min(len(a), len(b)):
        lacks.append(f"{plural(n, 'seed')} in common, needs {LEAST_SEEDS}")
    if not any(paired) and len(set(a.values())) > 1:
        lacks.append("the rows have the same score with every seed, as one model under two names would")
    if lacks:
        return Comparison(mean(paired), margin, n, "cannot be tested", tuple(lacks))
    if margin is None or abs(mean(paired)) <= margin:
        return Comparison(mean(paired), margin, n, "no difference")
    better = (mean(paired) > 0) == results.higher_is_better()
    return Comparison(mean(paired), margin, n, "better" if better else "worse")


def scored_fields(given: Record) -> list[str]:
    """Return the fields that say on what rows with these fields are scored, by the tasks of their kind of data.

    Of rows whose kind is not known they are those of all tasks.
    """
    found: dict[str, None] = {}
    for task in TASKS.get(given.get("data.kind", ""), all_tasks()):
        every = (name for name in given if name.startswith("data."))
        found |= dict.fromkeys(every if task.scored is None else task.scored)
    return list(found)


def _list_differences(results: Results, first: str, second: str) -> list[str]:
    """List what two rows would have to share for a comparison and do not: what they are scored on, and the tokens."""
    one, other = (results.plan.row_fields(row) for row in (first, second))
    names = scored_fields({**one, **other})
    found = [f"the rows differ in {name}" for name in names if one.get(name) != other.get(name)]
    seen = [sorted({r["tokens"] for r in results.finals(row) if r["score"] is not None}) for row in (first, second)]
    if results.plan.equal == "tokens" and seen[0] != seen[1]:
        each = " and ".join(", ".join(f"{n:,}" for n in row) for row in seen)
        found.append(f"the rows have not seen the same {results.unit()} ({each})")
    return found
