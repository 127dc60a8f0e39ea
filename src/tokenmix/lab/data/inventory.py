"""What a reader of a user's files found, and what it left out, with counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...system.text import printable
from ...types import Record

NAMES = 3  # of those left out that are shown
LONGEST = 40  # characters of a label that are shown
CLASSES = 8  # that are shown with their counts


@dataclass
class Inventory:
    """What was read of a source and what was not. A reader fills it in; ``train`` prints it and records it.

    Args:
        source: name or path that was read.
        found: what was found, in the order of reading: counts by their unit ("files", "rows") and facts as text
            ("columns").
        left_out: names that were not read, by the reason ("hidden", "no text"): how many, and the first few.
    """

    source: str
    found: dict[str, int | str] = field(default_factory=dict)
    left_out: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    def count(self, unit: str, n: int = 1) -> None:
        """Add to the number of things of a kind; the unit is a plural such as "files"."""
        self.found[unit] = int(self.found.get(unit, 0)) + n

    def tell(self, name: str, fact: str) -> None:
        """Record a fact, such as the columns that are read."""
        self.found[name] = fact

    def tell_counts(self, name: str, counts: dict[str, int]) -> None:
        """Record how many there are of each class or split, the most frequent of many first."""
        shown = list(counts.items())
        if len(shown) > CLASSES:
            shown = sorted(shown, key=lambda pair: -pair[1])[:CLASSES]
        rest = f" and {len(counts) - len(shown):,} more" if len(counts) > len(shown) else ""
        self.tell(name, ", ".join(f"{each[:LONGEST]} {n:,}" for each, n in shown) + rest)

    def leave(self, why: str, *names: str) -> None:
        """Record names of what is left out, and why."""
        n, first = self.left_out.get(why, (0, []))
        self.left_out[why] = n + len(names), [*first, *names[: NAMES - len(first)]]

    def merge(self, other: Inventory) -> None:
        """Add what another inventory found and left out: counts are summed, facts are taken over."""
        for name, value in other.found.items():
            if isinstance(value, int):
                self.count(name, value)
            else:
                self.tell(name, value)
        for why, (n, first) in other.left_out.items():
            had, shown = self.left_out.get(why, (0, []))
            self.left_out[why] = had + n, [*shown, *first][:NAMES]

    def lines(self) -> list[str]:
        """Return one line of what was read, and one of what was left out if anything was."""
        counts = [f"{value:,} {unit_of(name, value)}" for name, value in self.found.items() if type(value) is int]
        facts = [f"{name}: {value}" for name, value in self.found.items() if type(value) is not int]
        lines = [f"data: {self.source}: {'; '.join([', '.join(counts)] * bool(counts) + facts) or 'nothing'}."]
        left = [
            f"{n:,} {why} ({', '.join(first)}{', ...' * (n > len(first))})" for why, (n, first) in self.left_out.items()
        ]
        lines += [f"data: {self.source}: left out: {'; '.join(left)}."] * bool(left)
        return [printable(line).replace("\n", "\\n") for line in lines]

    def to_json(self) -> Record:
        """Return what a run records."""
        left = {why: {"count": n, "first": first} for why, (n, first) in self.left_out.items()}
        return {"source": self.source, "found": self.found, "left_out": left}

    @classmethod
    def from_json(cls, record: Record) -> Inventory:
        """Return what ``to_json`` recorded."""
        left = {why: (each["count"], list(each["first"])) for why, each in record["left_out"].items()}
        return cls(record["source"], dict(record["found"]), left)


def unit_of(unit: str, n: int) -> str:
    """Return a unit in its singular for one thing."""
    if n != 1:
        return unit
    return unit[:-3] + "y" if unit.endswith("ies") else unit[:-2] if unit.endswith("sses") else unit.removesuffix("s")


def first_names(names: Iterable[str], most: int = NAMES) -> str:
    """Return the first of some names, and how many there are if they are more."""
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most:,} more" if len(known) > most else "")
