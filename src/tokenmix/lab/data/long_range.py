"""Classes of long sequences, drawn here, after the Long Range Arena (Tay et al. 2020, arXiv 2011.04006).

That benchmark's ListOps (Nangia and Bowman 2018, arXiv 1804.06028) is made in the same way; its retrieval and its
pathfinder take downloads, and have tasks of the same kind in their place. A row is one text or two, and its label, one
token for each character. Rows are a function of the set and of the room, labels come in turns, and no text comes twice.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

from ...errors import MixerError
from .rows import Rows
from .tables import Row

ROWS = {"train": 16_000, "valid": 1000, "test": 1000}
"""Rows of each split."""
OPERATORS = "MNDS"
"""Of ListOps: maximum, minimum, median (the lower middle of an even number), and sum modulo 10."""
MOST_ARGUMENTS, DEEPEST, LEAST_ROOM = 5, 4, 5
LETTERS = "abcdefghijklmnopqrstuvwx"
FEWEST, MOST, OWN = 4, 10, 0.8
"""Letters of a source, and how often its next letter is one of them."""
EMPTY, DASH, END = ".#o"
STEPS = [(-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1)]
"""Down and right, in the order of their angles."""
CLEAR = 3
"""Least distance of two paths in pixels, along the axis on which it is larger; the dashes of one are 2 apart."""


class LongSet(NamedTuple):
    """A set of rows that are drawn.

    Attributes:
        about: what a row says.
        labels: the labels, equally frequent.
        least: fewest characters that a row needs room for.
        draw: function of a generator of random numbers and the most characters of a row that returns the row.
    """

    about: str
    labels: tuple[str, ...]
    least: int
    draw: Callable[[random.Random, int], Row]


def draw_rows(name: str, room: int) -> Rows:
    """Draw the splits of a set, the same on every machine.

    Args:
        name: a set of ``LONG_SETS``.
        room: most characters of a row, of its two texts together where it has two.

    Raises:
        MixerError: if the rows of the set need more room.
    """
    if room < LONG_SETS[name].least:
        raise MixerError(f"data: a row of {name} needs room for {LONG_SETS[name].least} characters, got {room}.")
    return _draw_rows(name, room)


@lru_cache(maxsize=1)
def _draw_rows(name: str, room: int) -> Rows:
    made, rng = LONG_SETS[name], random.Random(f"{name} {room}")
    seen: set[Row] = set()
    splits: dict[str, list[Row]] = {}
    for split, count in ROWS.items():
        rows: list[Row] = []
        surplus: dict[str, list[Row]] = defaultdict(list)
        while len(rows) < count:
            wanted = made.labels[len(rows) % len(made.labels)]
            while not surplus[wanted]:
                row = made.draw(rng, room)
                if row[:-1] not in seen:
                    seen.add(row[:-1])
                    surplus[row[-1]].append(row)
            rows.append(surplus[wanted].pop())
        splits[split] = rows
    return Rows(f"{name} of {room}", splits)


def draw_list(rng: random.Random, room: int) -> Row:
    """Draw an expression of ListOps such as ``[M29[N47]0]`` of half the room at least, and its value."""
    while True:
        text, value = _expression(rng, room, DEEPEST)
        if len(text) >= room // 2:
            return text, str(value)


def _expression(rng: random.Random, room: int, depth: int) -> tuple[str, int]:
    operator, count = rng.choice(OPERATORS), rng.randint(2, MOST_ARGUMENTS)
    texts, values, left = [], [], room - 3
    for i in range(min(count, left)):
        share = left // (count - i)
        if depth > 1 and share >= LEAST_ROOM and rng.random() < 0.75:
            text, value = _expression(rng, share, depth - 1)
        else:
            value = rng.randrange(10)
            text = str(value)
        texts.append(text)
        values.append(value)
        left -= len(text)
    return f"[{operator}{''.join(texts)}]", apply_operator(operator, values)


def apply_operator(operator: str, values: list[int]) -> int:
    """Return the value of an operator of ``OPERATORS`` on its arguments."""
    if operator == "M":
        return max(values)
    if operator == "N":
        return min(values)
    return sum(values) % 10 if operator == "S" else sorted(values)[(len(values) - 1) // 2]


def draw_documents(rng: random.Random, room: int) -> Row:
    """Draw two documents of equal length, of one source ("same") or of two ("other")."""
    size, sources = room // 2, [rng.sample(LETTERS, rng.randint(FEWEST, MOST)) for _ in range(2)]
    label = rng.choice(("same", "other"))
    first, second = (
        "".join(rng.choice(source if rng.random() < OWN else LETTERS) for _ in range(size))
        for source in (sources[0], sources[label == "other"])
    )
    return first, second, label


def draw_paths(rng: random.Random, room: int) -> Row:
    """Draw an image of two dashed paths and some single dashes, line by line, and whether two ends are "joined".

    The ends are those of one path, or one of each ("apart"). Which of the two is drawn by lot for an image that has
    both at nearly the same distance, so that neither distance nor length tells.
    """
    side = math.isqrt(room)
    image = Image(side)
    while True:
        first = image.walk(rng, image.inside, side)
        second = image.walk(rng, image.inside & ~image.around(first), side)
        if first and second and (pairs := image.equal_pairs(rng, first, second)):
            break
    drawn = [cell for path in (first, second) for i, cell in enumerate(path) if i % 3 != 2]
    free = image.inside & ~image.around(first + second)
    for _ in range(side // 4):
        dash = image.walk(rng, free, 2, tries=4)
        drawn += dash
        free &= ~image.around(dash)
    label = rng.choice(("joined", "apart"))
    return image.text(drawn, pairs[label == "apart"]), label


class Image:
    """A square of pixels, each an index of a bit of integers, with a border that no path enters."""

    def __init__(self, side: int):
        self.side, self.width = side, side + CLEAR
        self.cells = [(y + CLEAR) * self.width + x for y in range(side) for x in range(side)]
        self.inside = sum(1 << cell for cell in self.cells)
        self.steps = [dy * self.width + dx for dy, dx in STEPS]

    def walk(self, rng: random.Random, free: int, length: int, tries: int = 20) -> list[int]:
        """Draw a path through free pixels, which turns by up to 45 degrees at each step; [] if none is found."""
        for _ in range(tries):
            at, way, left = rng.choice(self.cells), rng.randrange(8), free
            if not left >> at & 1:
                continue
            path = [at]
            while len(path) < length:
                left ^= 1 << at
                ways = [turn % 8 for turn in (way - 1, way, way, way + 1) if left >> at + self.steps[turn % 8] & 1]
                if not ways:
                    break
                way = rng.choice(ways)
                at += self.steps[way]
                path.append(at)
            else:
                return path
        return []

    def around(self, path: list[int]) -> int:
        """Return the pixels that are nearer than ``CLEAR`` to a path."""
        line = sum(1 << cell for cell in path)
        for step in (1, self.width):
            line = reduce(or_, (line << n * step | line >> n * step for n in range(CLEAR)))
        return line

    def equal_pairs(
        self, rng: random.Random, first: list[int], second: list[int]
    ) -> tuple[list[int], list[int]] | None:
        """Return the ends of one path, and one end of each, which are equally far from each other up to a pixel."""
        ends = [first[0], first[-1]], [second[0], second[-1]]
        across = [([a, b], self.distance(a, b)) for a in ends[0] for b in ends[1]]
        found = [(own, pair) for own in ends for pair, far in across if abs(far - self.distance(*own)) < 1]
        return rng.choice(found) if found else None

    def distance(self, a: int, b: int) -> float:
        """Return the distance of two pixels."""
        return math.dist(divmod(a, self.width), divmod(b, self.width))

    def text(self, drawn: list[int], ends: list[int]) -> str:
        """Write the image line by line."""
        marks = dict.fromkeys(drawn, DASH) | dict.fromkeys(ends, END)
        return "".join(marks.get(cell, EMPTY) for cell in self.cells)


LONG_SETS = {
    "listops": LongSet("value of a nested expression over digits", tuple("0123456789"), 8, draw_list),
    "retrieval": LongSet("whether two documents of letters have one source", ("same", "other"), 8, draw_documents),
    "pathfinder": LongSet(
        "whether a dashed path joins two ends in an image that is read pixel by pixel",
        ("joined", "apart"),
        64,
        draw_paths,
    ),
}
"""The sets by name."""
