"""What the pixels of a mask mean: labels or colours, and the classes they name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ...errors import MixerError
from ...system.text import whole_number
from ...types import Record
from .pair_sampler import IGNORED

Colour = tuple[int, int, int]
NAMES = "classes.txt"
MOST_COLOURS = 256
MOST_LABELS = 65_536
BINARY = (0, 255)  # masks in black and white
FORM = "each line is NAME, or NAME RED GREEN BLUE, for masks that hold colours"


@dataclass(frozen=True)
class Legend:
    """How the pixels of a mask name classes.

    Args:
        classes: names of the classes.
        colours: colours of the classes in masks that are pictures; None: masks hold labels.
        ignored: colours of no class.
        ignore: label of no class; None: every label is a class.
        first: label of the first class.
        labels: labels of the classes where they do not follow each other; None: they do, from ``first`` on.
    """

    classes: tuple[str, ...]
    colours: tuple[Colour, ...] | None = None
    ignored: tuple[Colour, ...] = ()
    ignore: int | None = 255
    first: int = 0
    labels: tuple[int, ...] | None = None

    @classmethod
    def from_json(cls, record: Record) -> Legend:
        """Return what ``dataclasses.asdict`` made of a legend, after it was JSON."""
        colours, labels = record["colours"], record["labels"]
        return cls(
            tuple(record["classes"]),
            None if colours is None else tuple((r, g, b) for r, g, b in colours),
            tuple((r, g, b) for r, g, b in record["ignored"]),
            record["ignore"],
            record["first"],
            None if labels is None else tuple(labels),
        )

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Return the raw pixel of each class: its label, or its colour as one number."""
        if self.colours is not None:
            return tuple(map(number_of, self.colours))
        return self.labels or tuple(range(self.first, self.first + len(self.classes)))

    @cached_property
    def table(self) -> dict[int, int]:
        """Return the class of each raw pixel, ``IGNORED`` for those of no class."""
        ignored = [number_of(c) for c in self.ignored]
        if self.colours is None and self.ignore is not None:
            ignored = [self.ignore]
        return {key: i for i, key in enumerate(self.keys)} | dict.fromkeys(ignored, IGNORED)

    def read(self, raw: Tensor, name: str) -> Tensor:
        """Return classes, int64 (H, W), of the raw pixels of a mask: colours as one number each, or labels.

        Raises:
            MixerError: for a colour or a label of no class, with the place of the first.
        """
        known = self.table
        values, places = raw.unique(return_inverse=True)
        table = [known.get(int(v)) for v in values]
        if None in table:
            bad = table.index(None)
            row, column = divmod(int((places.flatten() == bad).nonzero()[0]), raw.shape[1])
            raise MixerError(f"masks: {name}: {self._explain_unknown(int(values[bad]))} at row {row}, column {column}.")
        return torch.tensor(table, dtype=torch.int64)[places]

    def _explain_unknown(self, value: int) -> str:
        n = len(self.classes)
        if self.colours is not None:
            return f"the colour {colour_of_number(value)} is none of the {n} classes"
        if self.labels is not None:
            return f"the label {value} is none of {', '.join(map(str, self.labels))}"
        ignored = "" if self.ignore is None else f" (and {self.ignore}, which is ignored)"
        return (
            f"the label {value} is out of range; {n} classes have labels {self.first} to "
            + f"{self.first + n - 1}{ignored}"
        )


def read_names(file: Path) -> list[tuple[str, Colour | None]]:
    """Return the names and colours in classes.txt; nothing if there is no such file."""
    if not file.is_file():
        return []
    found: list[tuple[str, Colour | None]] = []
    for number, line in enumerate(file.read_text("utf-8-sig", errors="replace").splitlines(), 1):
        words = line.split()
        if not words:
            continue
        ends = [-1 if (n := whole_number(word)) is None else n for word in words[-3:]]
        coloured = len(words) > 3 and all(0 <= n < 256 for n in ends)
        found.append((" ".join(words[:-3] if coloured else words), (ends[0], ends[1], ends[2]) if coloured else None))
        if [name for name, _ in found].count(found[-1][0]) > 1 and found[-1][0] != "ignore":
            raise MixerError(f"masks: {file}, line {number}: the class {found[-1][0]!r} is there twice.")
    if len({c is None for _, c in found}) > 1:
        raise MixerError(f"masks: {file} gives colours to some classes only; {FORM}.")
    return found


def legend_of(
    root: Path,
    named: list[tuple[str, Colour | None]],
    total: Counter[int],
    colours: bool,
    ignore: int | None,
    first: int,
) -> Legend:
    """Return what the pixels of masks mean, of which there are as many as in ``total``.

    Args:
        named: content of classes.txt; empty: there is none.
        colours: masks hold colours.
    """
    names = tuple(n for n, c in named if n != "ignore")
    ignored = tuple(c for n, c in named if n == "ignore" and c is not None)
    if colours:
        if not named:
            return _guessed_colours(root, total, ignore, first)
        given = tuple(c for n, c in named if n != "ignore" and c is not None)
        if len(given) != len(names):
            raise MixerError(f"masks: {root / NAMES} names classes without colours, but masks are pictures; {FORM}.")
        return Legend(names, given, ignored, ignore, first)
    black_and_white = set(total) == set(BINARY) and first == 0 and ignore in (None, BINARY[1])
    if black_and_white and (not names or len(names) == len(BINARY)):
        return Legend(names or tuple(map(str, BINARY)), None, (), None, first, BINARY)
    if named:
        return Legend(names, None, (), ignore, first)
    labels = [value for value in total if value != ignore]
    below = [value for value in labels if value < first]
    if below:
        raise MixerError(
            f"masks: {root} has the label {min(below)}, below data.first_label={first}, that is not ignored."
        )
    largest = max(labels, default=first - 1)
    if largest - first >= MOST_LABELS:
        raise MixerError(
            f"masks: {root} has the label {largest}, more than the {MOST_LABELS} classes that are possible; renumber "
            + f"the labels, or leave this one out with data.ignore={largest}."
        )
    return Legend(tuple(str(first + i) for i in range(largest - first + 1)), None, (), ignore, first)


def _guessed_colours(root: Path, total: Counter[int], ignore: int | None, first: int) -> Legend:
    if len(total) > MOST_COLOURS:
        raise MixerError(
            f"masks: the masks of {root} have {len(total)} colours, which are no classes; name the classes and "
            + f"their colours in {NAMES}."
        )
    found = [colour_of_number(value) for value in sorted(total)]
    return Legend(tuple("#" + "".join(f"{n:02x}" for n in c) for c in found), tuple(found), (), ignore, first)


def grey_labels(total: Counter[int]) -> Counter[int]:
    """Return how often each grey level occurs among colours that are all grey."""
    return Counter({value % 256: n for value, n in total.items()})


def are_grey_labels(total: Counter[int], ignore: int | None, first: int) -> bool:
    """Return whether colours are labels that were saved as grey colours: all numbers from the first label on, or 0 and
    255 alone.
    """
    if any(value % 256 * 0x10101 != value for value in total):
        return False
    labels = {value % 256 for value in total}
    numbers = labels - {ignore}
    return labels == set(BINARY) or (len(numbers) > 1 and numbers == set(range(first, first + len(numbers))))


def pack_colours(picture: Tensor) -> Tensor:
    """Return the colours of a picture (3, H, W) as one number each, int64 (H, W)."""
    red, green, blue = picture.long()
    return red * 65536 + green * 256 + blue


def number_of(colour: Colour) -> int:
    """Return a colour as the number red * 65536 + green * 256 + blue."""
    return colour[0] * 65536 + colour[1] * 256 + colour[2]


def colour_of_number(number: int) -> Colour:
    """Return the colour of such a number."""
    return number // 65536, number // 256 % 256, number % 256
