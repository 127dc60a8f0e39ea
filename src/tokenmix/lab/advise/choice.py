"""The verdict, and the candidate that would be written: by what was measured at the lengths and in the runtime asked
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .candidates import OWN, Candidate
from .measuring import Share
from .probe import Nearness

YES, NO, OPEN = "yes", "no", "open"
RULE = (
    "The rule: of the candidates that reach the bar at the longest length where any does, the fastest; "
    "where the quartiles of several overlap with its own and the probe ranks all of them, the nearest to attention."
)


@dataclass(frozen=True)
class Choice:
    """The candidate that the rule selects, its row, and why."""

    row: Candidate
    why: str


def rows_in(rows: Sequence[Candidate], runtime: str) -> list[Candidate]:
    """Return the timed candidates of one runtime, without the model's own attention."""
    return [r for r in rows if r.runtime == runtime and r.speedup is not None and r.mixer != OWN]


def at_longest(rows: Sequence[Candidate]) -> list[Candidate]:
    """Return the rows at the longest length that has any, the fastest first."""
    last = max((r.length for r in rows), default=None)
    return sorted((r for r in rows if r.length == last), key=lambda r: -(r.speedup or 0.0))


def decide(shares: Sequence[Share], rows: Sequence[Candidate], worth: float, runtime: str, left_out: bool) -> str:
    """Return "yes" where a candidate was measured to reach the bar by its lower quartile too, "no" where all miss it by
    their upper quartiles, and "open" where the bar lies between the quartiles of one.

    Without a measured candidate it is "no" where not even a model without its attention would reach the bar, as timed
    in eager torch, else "open".

    Args:
        left_out: whether a length that the model takes was left out; nothing is then "no".
    """
    timed = rows_in(rows, runtime)
    if any(r.reaches(worth) for r in timed):
        return YES
    if left_out or (timed and untimed(shares, timed)):
        return OPEN
    if timed:
        return OPEN if any(r.high_speedup >= worth for r in timed) else NO
    return NO if runtime == "eager" and all(s.limit < worth for s in shares) else OPEN


def untimed(shares: Sequence[Share], timed: Sequence[Candidate]) -> list[int]:
    """Return the lengths asked for at which no candidate was timed."""
    return [s.length for s in shares if all(r.length != s.length for r in timed)]


def choose(rows: Sequence[Candidate], nearness: Mapping[str, Nearness], worth: float, runtime: str) -> Choice | None:
    """Apply the rule; where no candidate reaches the bar, to all that were measured; None where none was."""
    timed = rows_in(rows, runtime)
    reached = [r for r in timed if r.reaches(worth)]
    allowed = at_longest(reached or timed)
    if not allowed:
        return None
    first = allowed[0]
    whose = f"that reach {worth:g}x" if reached else f"measured, none of which reaches {worth:g}x"
    alike = [r for r in allowed if r.high_speedup >= first.low_speedup]
    ranked = [r for r in alike if r.mixer in nearness and nearness[r.mixer].ranks]
    if len(alike) > 1 and len(ranked) == len(alike):
        best = min(alike, key=lambda r: nearness[r.mixer].after)
        others = ", ".join(r.mixer for r in alike if r is not best)
        return Choice(
            best, f"the nearest to attention of the candidates {whose}; {others} as fast within the quartiles"
        )
    tied = ", ".join(r.mixer for r in alike[1:])
    noted = f"; {tied} as fast within the quartiles, quality not ranked" if tied else ""
    return Choice(first, f"the fastest of the candidates {whose}{noted}")
