"""Report the result of a conversion for every tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Self

from ..errors import MixerError
from ..system.files import read_json
from ..types import Record

REPORT = "report.json"
"""The file of a converted folder in which its report lies."""
STATUSES = ("copied", "split", "new", "dropped")
# the first number in a name counts the layers of the stack before it
LAYER = re.compile(r"(?:(?P<stack>.*?)\.)?(?P<number>\d+)\.")


@dataclass(frozen=True)
class Entry:
    """Hold one tensor: of the new model if copied, split or new, of the source if dropped.

    Args:
        origin: its name in the source, if it has one.
        parameter: False for a buffer, which is not counted.
    """

    name: str
    status: str
    shape: tuple[int, ...]
    origin: str | None = None
    parameter: bool = True

    @property
    def size(self) -> int:
        """Return how many parameters it holds."""
        return prod(self.shape) if self.parameter else 0


@dataclass(frozen=True)
class Report:
    """Hold the result for each tensor: copied whole, split from a larger tensor, new, or dropped from the source.

    ``print(report)`` shows a table; ``to_json`` lists every tensor by name.
    """

    source: str
    target: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    def names(self, *statuses: str) -> list[str]:
        """Return the names of the tensors with one of these statuses."""
        return [e.name for e in self.entries if e.status in statuses]

    def parameters(self, *statuses: str) -> int:
        """Return how many parameters these tensors hold together."""
        return sum(e.size for e in self.entries if e.status in statuses)

    @property
    def share(self) -> float:
        """Return the share of the new model's parameters that comes from the source."""
        return self.parameters("copied", "split") / max(self.parameters("copied", "split", "new"), 1)

    def to_json(self) -> Record:
        """Return plain JSON values."""
        counts = {s: {"tensors": len(self.names(s)), "parameters": self.parameters(s)} for s in STATUSES}
        tensors = [
            {"name": e.name, "status": e.status, "shape": list(e.shape), "origin": e.origin}
            | ({} if e.parameter else {"parameter": False})
            for e in self.entries
        ]
        return {
            "source": self.source,
            "target": self.target,
            "share": self.share,
            "counts": counts,
            "notes": list(self.notes),
            "tensors": tensors,
        }

    @classmethod
    def from_json(cls, given: Record) -> Self:
        """Invert ``to_json``."""
        entries = tuple(
            Entry(t["name"], t["status"], tuple(t["shape"]), t["origin"], t.get("parameter", True))
            for t in given["tensors"]
        )
        return cls(given["source"], given["target"], entries, tuple(given["notes"]))

    def __str__(self) -> str:
        whole = self.parameters("copied", "split", "new")
        lines = [f"{self.source} -> {self.target}", f"{'':8} {'tensors':>8} {'parameters':>13}"]
        for status in STATUSES:
            size = self.parameters(status)
            share = "  of the source" if status == "dropped" else f" {size / max(whole, 1):7.2%}"
            lines.append(f"{status:8} {len(self.names(status)):8} {size:13,}{share}")
        for title, entries in _layers(self.entries):
            lines.append(title)
            lines += [f"  {status:8} {', '.join(names)}" for status, names in _by_status(entries)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def read_report(folder: Path | str) -> Report:
    """Read the report of a folder that ``tokenmix convert`` or ``save_replaced`` wrote.

    Raises:
        MixerError: if the folder has none, as where it was saved without one, or it cannot be read.
    """
    file = Path(folder) / REPORT
    if not file.is_file():
        without = "a model saved by save_pretrained, or by save_replaced without a report, has none"
        raise MixerError(f"{folder}: holds no {REPORT}; {without}.")
    try:
        return Report.from_json(read_json(file))
    except (KeyError, TypeError, AttributeError) as why:
        raise MixerError(f"{file}: is not the report of a conversion ({type(why).__name__}: {why}).") from None


def _layers(entries: Iterable[Entry]) -> list[tuple[str, list[Entry]]]:
    """Group tensors: first those outside the layers, then runs of layers treated alike, stack by stack."""
    outside: list[Entry] = []
    stacks: dict[str, dict[int, list[Entry]]] = {}
    for e in entries:
        found = LAYER.match(e.name)
        if found is None:
            outside.append(e)
        else:
            stacks.setdefault(found["stack"] or "", {}).setdefault(int(found["number"]), []).append(e)
    runs = []
    for stack, layers in stacks.items():
        named = f" of {stack}" if len(stacks) > 1 else ""
        for _, run in groupby(
            sorted(layers), key=lambda i: [(LAYER.sub("", e.name, count=1), e.status, e.shape) for e in layers[i]]
        ):
            numbers = list(run)
            run_title = f"layers {numbers[0]} to {numbers[-1]}{named}, each"
            title = f"layer {numbers[0]}{named}" if len(numbers) == 1 else run_title
            runs.append((title, layers[numbers[0]]))
    return [("outside the layers", outside), *runs]


def _by_status(entries: list[Entry]) -> list[tuple[str, list[str]]]:
    """Return the names of each status; a module whose weight and bias fare alike is named once."""
    fates: dict[str, set[str]] = {}
    for e in entries:
        fates.setdefault(_module(e.name), set()).add(e.status)
    found = []
    for status in STATUSES:
        names = [e.name if len(fates[_module(e.name)]) > 1 else _module(e.name) for e in entries if e.status == status]
        found.append((status, [LAYER.sub("", name, count=1) for name in dict.fromkeys(names)]))
    return [(status, names) for status, names in found if names]


def _module(name: str) -> str:
    """Return the name without its last part if that is weight or bias."""
    module, _, leaf = name.rpartition(".")
    return module if leaf in ("weight", "bias") else name
