"""Which of two series of measurements is better at which length, as a sentence."""

from __future__ import annotations

TIE = 0.05


def wins(ours: dict[int, float], theirs: dict[int, float], *, lower: bool) -> dict[int, bool]:
    """Return at each common length whether ours is better by more than five percent, about the noise of a shared
    machine.
    """
    sign = 1 if lower else -1
    return {
        n: sign * (theirs[n] - ours[n]) > TIE * max(abs(ours[n]), abs(theirs[n]))
        for n in sorted(ours.keys() & theirs.keys())
    }


def stops_winning(name: str, ours: dict[int, float], rival: str, theirs: dict[int, float], *, lower: bool) -> str:
    """Say where ``name`` beats ``rival`` and from which measured length on it no longer does."""
    won = wins(ours, theirs, lower=lower)
    lengths = list(won)
    if not lengths:
        return f"{name} and {rival} were not measured at a common length"
    span = f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}"
    if all(won.values()):
        return f"{name} beats {rival} at every length measured ({span})"
    if not any(won.values()):
        return f"{name} beats {rival} at no length measured ({span})"
    if won[lengths[-1]]:
        lost = _join([n for n in lengths if not won[n]])
        at = _join([n for n in lengths if won[n]])
        return f"{name} beats {rival} at {at}, the longest measured among them, but not at {lost}"
    last = max(i for i, n in enumerate(lengths) if won[n])
    if all(won[n] for n in lengths[:last]):
        return f"{name} beats {rival} up to {lengths[last]:,} and stops winning at {lengths[last + 1]:,}"
    return (
        f"{name} beats {rival} at {_join([n for n in lengths if won[n]])} and no longer from {lengths[last + 1]:,} on"
    )


def _join(lengths: list[int]) -> str:
    return ", ".join(f"{n:,}" for n in lengths)
