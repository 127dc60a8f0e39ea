"""The gain from replacing a part of a whole (Amdahl 1967), and the length from which it pays, computed from shares of
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from ...errors import MixerError


def bound(share: float, left: float = 0.0) -> float:
    """Compute how many times as fast the whole becomes when a part takes ``left`` times as long: 1 / (1 - share + share
    left).

    Args:
        share: the part's share of the time, in [0, 1); with ``left`` > 0 also 1.
        left: 0: the part takes no time at all, which bounds any replacement.
    """
    if not 0 <= share <= 1 or left < 0 or (share == 1 and left == 0):
        raise MixerError(
            f"bound: expects a share in [0, 1] and left >= 0, of which something remains, got {share} and {left}."
        )
    return 1 / (1 - share + share * left)


def share_for(speedup: float) -> float:
    """Compute the share of the time that must vanish for a speed-up of the whole: 1 - 1 / speedup."""
    if not speedup > 1:
        raise MixerError(f"share_for: a speed-up is larger than 1, got {speedup}.")
    return 1 - 1 / speedup


@dataclass(frozen=True)
class Crossing:
    """Where a share is first reached.

    Args:
        tokens: the length; None: nowhere, as far as can be estimated.
        how: "measured": at the shortest length measured, or before it; "between": between two measured lengths;
            "beyond": after the longest, by the formula.
    """

    tokens: float | None
    how: str


def first_length(tokens: Sequence[int], shares: Sequence[float], wanted: float) -> Crossing:
    """Estimate the length at which mixing's share of the time first reaches ``wanted``.

    Mixing T tokens costs T^2 and all else T, so the ratio of the two, s / (1 - s), grows like T. Between two measured
    lengths it is interpolated by the power of T through both; beyond the longest it grows in proportion to T.

    Args:
        tokens: ascending.
        shares: measured there, each in [0, 1).
    """
    goal = wanted / (1 - wanted)
    odds = [s / (1 - s) for s in shares]
    at = next((i for i, r in enumerate(odds) if r >= goal), None)
    if at == 0:
        return Crossing(tokens[0], "measured")
    if at is None:
        return Crossing(None if not odds or odds[-1] <= 0 else tokens[-1] * goal / odds[-1], "beyond")
    before, after = odds[at - 1], odds[at]
    if before <= 0:
        return Crossing(tokens[at], "between")
    part = log(goal / before) / log(after / before)
    return Crossing(tokens[at - 1] * (tokens[at] / tokens[at - 1]) ** part, "between")


def expected_seconds(seconds: float, mixing: float, tokens: int, wanted: int) -> float:
    """Estimate at another length what takes ``seconds`` at ``tokens``, ``mixing`` of them in T^2 and the rest in T."""
    ratio = wanted / tokens
    return (seconds - mixing) * ratio + mixing * ratio**2
