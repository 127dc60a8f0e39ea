"""A claim of a paper, its numbers, and the verdict that follows from what was printed and what is computed here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...errors import MixerError
from ...types import Options
from .dotted import find_code

Value = float | int | str
F = TypeVar("F", bound=Callable[..., Any])

CONFIRMED, CONTRADICTED, NO_DIFFERENCE = "confirmed", "contradicted", "no difference"
UNTESTABLE, NOT_BUILT = "cannot be tested here", "not built yet"
STATED = "stated alike"
VERDICTS = (CONFIRMED, CONTRADICTED, NO_DIFFERENCE, UNTESTABLE, NOT_BUILT, STATED)
"""The verdicts. Trials get one of the first four, by docs/evidence.md."""
MEASURES = {
    "faster": ("ms", -1),
    "slower": ("ms", 1),
    "smaller": ("MiB", -1),
    "larger": ("MiB", 1),
    "higher": ("", 1),
}
"""What a paper says of what is measured of one row against another: the unit, and the sign of the difference.

Without a unit here, the file of the results names what it has of each row ("metric").
"""
CLAIMED = ("better", "worse", "like", *MEASURES)
"""What a paper says of one row against another. A difference contradicts "like", and that none is found is no proof."""
PLAIN = re.compile(r"-?[\d,]*\d(\.\d+)?")


def mark_stated(function: F) -> F:
    """Mark a function that reads what the library states, such as a cost formula or a default, and computes no model.

    That it agrees with a paper shows that we wrote down the same, and is no test.
    """
    function.stated = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Number:
    """One number of a claim: as printed, and how it is computed here.

    Args:
        name: what is counted or scored, unique within its section.
        printed: the number as printed: "5.9", "1,433", "about 4", "> 60", "10 to 27", or a word.
        unit: unit of the printed number, and of ours.
        compute: function of this folder that computes our value, such as "counts.parameters"; "" if that takes
            training, or if what it needs is not built.
        args: its arguments.
        source: who prints it, where that is not the paper itself, such as "second-hand" or "official code".
        why: reason for a contradiction, which must have one, or for a value that is missing.
        untested: the verdict of a number that is not computed.
        result: file in ``benchmarks/results`` and the keys of a value measured there, "file.json:key/key"; that value
            is shown, but decides nothing.
        derived: whether the paper prints a formula only, from which ``printed`` follows.
    """

    name: str
    printed: str
    unit: str = ""
    compute: str = ""
    args: Options = field(default_factory=dict)
    source: str = ""
    why: str = ""
    untested: str = UNTESTABLE
    result: str = ""
    derived: bool = False

    @property
    def function(self) -> Callable[..., Value]:
        """Return the function that computes our value."""
        found: Callable[..., Value] = find_code(f"lab.papers.{self.compute}")
        return found

    @property
    def kind(self) -> str:
        """Return how our value comes about: "computed" from a built model or a run, "stated", or "" without one."""
        if not self.compute:
            return ""
        return "stated" if getattr(self.function, "stated", False) else "computed"

    def verdict(self, ours: Value | None) -> str:
        """Return the verdict on our value; None where nothing was computed."""
        if not self.compute or ours is None:
            return self.untested
        if not agrees(self.printed, ours):
            return CONTRADICTED
        return STATED if self.kind == "stated" else CONFIRMED


@dataclass(frozen=True)
class Trial:
    """A claim put to small models, or to time and memory on this project's machines: one row against another.

    Args:
        sweep: name of a plan under ``benchmarks/sweeps``, or of the file in ``benchmarks/results`` that holds what was
            measured: "directions", time and memory, and "word_weights", "locality" and "detector_small", what
            trained models do.
        row: row of which something is claimed.
        claimed: what the paper says of it, one of ``CLAIMED``: "better" or "worse" than the other, or "like" it; or
            one of ``MEASURES``.
        against: the other row.
        after: share of the training after which trained models are compared; a claim of faster learning asks below 1.
    """

    sweep: str
    row: str
    claimed: str
    against: str
    after: float = 1.0

    @property
    def is_measured(self) -> bool:
        """Return whether time or memory decide it, and not trained models."""
        return MEASURES.get(self.claimed, ("",))[0] in ("ms", "MiB")

    @property
    def relation(self) -> str:
        """Return what is claimed as words between the rows, such as "better than"."""
        when = f" after {self.after:.0%} of the training" if self.after < 1 else ""
        return f"like{when}" if self.claimed == "like" else f"{self.claimed}{when} than"

    def text(self, form: str = "{}") -> str:
        """Return what is claimed as words, the names of rows in this form."""
        return f"{form.format(self.row)} {self.relation} {form.format(self.against)}"


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Args:
        section: section, equation, table or figure that makes the claim.
        says: the claim in our words.
        numbers: its numbers, at least one.
        equation: equation as text, "" where there is none.
        code: dotted path of what implements it below ``tokenmix``, such as "functional.hydra.hydra".
        example: file below the project that implements it in an example, where the library does not.
        command: command of at most 90 seconds that shows it; None for that which computes the numbers.
        small: section of the documentation that has the same question at a small size: "page.md#section".
        trials: comparisons of small models that answer it by the protocol.
    """

    section: str
    says: str
    numbers: tuple[Number, ...]
    equation: str = ""
    code: str = ""
    example: str = ""
    command: str | None = None
    small: str = ""
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True)
class Paper:
    """A source with its claims.

    Args:
        key: name on the command line, which is that of its file.
        title: title of the document.
        authors: first author and year, or "" for a document without.
        arxiv: number on arXiv, or "".
        order: place in lists and on the page.
        claims: its claims, section by section.
    """

    key: str
    title: str
    order: int
    claims: tuple[Claim, ...]
    authors: str = ""
    arxiv: str = ""

    @property
    def year(self) -> str:
        """Return the year of the document, or "" where none is known."""
        return self.authors.split()[-1] if self.authors else ""

    def command(self, claim: Claim) -> str:
        """Return the command that shows a claim: its own, or the one that computes its numbers; "" if none does."""
        if claim.command is not None:
            return claim.command
        computed = any(number.compute for number in claim.numbers)
        return f'tokenmix paper {self.key} --section "{claim.section}" --run' if computed else ""

    def numbers(self) -> dict[str, Number]:
        """Return every number by its key, "section: name"."""
        return {f"{claim.section}: {number.name}": number for claim in self.claims for number in claim.numbers}

    def verdicts(self, ours: dict[str, Value]) -> Counter[str]:
        """Count the verdicts, given our values by the keys of ``numbers``."""
        return Counter(number.verdict(ours.get(key)) for key, number in self.numbers().items())


def agrees(printed: str, ours: Value) -> bool:
    """Compare our value with a printed one, to the digits that are printed.

    "5.9" asks that ours rounds to 5.9, "about 60" the same to its significant digits, "> 60" and "10 to 27" what they
    say; anything else must be the same word.
    """
    if isinstance(ours, str) or not any(c.isdigit() for c in printed):
        return printed == ours
    if match := re.fullmatch(r"(>|<) ?(\S+)", printed):
        bound = _number(match[2])
        return ours > bound if match[1] == ">" else ours < bound
    if match := re.fullmatch(r"(\S+) to (\S+)", printed):
        return _number(match[1]) <= ours <= _number(match[2])
    about = printed.startswith("about ")
    digits = printed.removeprefix("about ")
    places = len(digits.partition(".")[2])
    if about and not places:
        places = -(len(digits) - len(digits.rstrip("0")))
    return round(ours, places) == round(_number(digits), places)


def _number(text: str) -> float:
    if not PLAIN.fullmatch(text):
        raise MixerError(f"papers: {text!r} is no printed number.")
    return float(text.replace(",", ""))


def write_value(printed: str, ours: Value) -> str:
    """Write our value with two digits more than the printed one has, and whole numbers whole."""
    if isinstance(ours, str):
        return ours
    if isinstance(ours, int):
        return f"{ours:,}"
    places = max((len(part.partition(".")[2]) for part in re.findall(r"\d[\d.]*", printed)), default=0)
    return f"{ours:,.{places + 2}f}"
