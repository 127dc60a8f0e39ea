"""Dialogues in the form of PersonaChat as ParlAI writes it: what two people say in turn, and what is known of them.

Lines are numbered, and a dialogue begins wherever the number is 1::

    1 your persona: i have two cats .
    2 hi , how are you ?<TAB>fine , my cats are asleep .<TAB><TAB>another reply|one more
    3 how many do you have ?<TAB>two .

The candidates in the last column are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...errors import MixerError
from ...system.text import whole_number
from .lines import read_lines, read_start

YOUR, PARTNER = "your persona: ", "partner's persona: "
THEM, YOU = "them: ", "you: "
"""What stands before each turn in a source: ``YOU`` is who replies."""
PARTS = re.compile(rf" (?={YOUR}|{PARTNER}|{THEM}|{YOU})")


class Dialogue(NamedTuple):
    """A dialogue.

    Attributes:
        lines: persona sentences and turns, in their order.
        pairs: for each reply, what was known and said before it, and the reply.
    """

    lines: list[str]
    pairs: list[tuple[str, str]]


def is_dialogues(path: Path) -> bool:
    """Return whether a file holds dialogues, by its beginning: the number 1, a space and more."""
    return re.match(rb"(\xef\xbb\xbf)?1 \S", read_start(path, 16)) is not None


def read_dialogues(path: Path) -> list[Dialogue]:
    """Read the dialogues of a file.

    The source of a reply is one line: the persona sentences, then all turns before it, each after ``THEM`` or ``YOU``.

    Raises:
        MixerError: for a line that is not numbered in order, an utterance without a reply and a dialogue without an
            utterance, with the file and the line.
    """
    found: list[Dialogue] = []
    personas: list[str] = []
    turns: list[str] = []
    last = began = 0
    for i, line in enumerate(read_lines(path), 1):
        where = f"data: line {i} of {path}"
        first, _, said = line.partition(" ")
        number = whole_number(first)
        if number is None or not said.strip():
            raise MixerError(f"{where} must begin with its number in the dialogue and a space, got {line[:80]!r}.")
        if number == 1:
            _check_ended(found, path, began)
            personas, turns, began = [], [], i
            found.append(Dialogue([], []))
        elif number != last + 1:
            raise MixerError(
                f"{where} has the number {number} after {last}; the lines of a dialogue count 1, 2, 3 and so on, and "
                + "a new dialogue begins with 1."
            )
        last = number
        if said.startswith((YOUR, PARTNER)) and "\t" not in said:
            personas.append(said.strip())
            found[-1].lines.append(said.strip())
        else:
            utterance, reply = _turn(said, where)
            found[-1].pairs.append((" ".join([*personas, *turns, THEM + utterance]), reply))
            turns += [THEM + utterance, YOU + reply]
            found[-1].lines.extend(turns[-2:])
    _check_ended(found, path, began)
    return found


def _turn(said: str, where: str) -> tuple[str, str]:
    """Return the utterance and the reply of a line."""
    columns = [column.strip() for column in said.split("\t")]
    if len(columns) < 2 or not columns[0] or not columns[1]:
        raise MixerError(
            f"{where} must hold an utterance, a tab and its reply, or begin with {YOUR.strip()!r} or "
            + f"{PARTNER.strip()!r}; got {said[:80]!r}."
        )
    return columns[0], columns[1]


def _check_ended(found: list[Dialogue], path: Path, began: int) -> None:
    if found and not found[-1].pairs:
        raise MixerError(f"data: the dialogue that begins in line {began} of {path} has no utterance and reply.")


def fit_parts(source: str, most: int, count: Callable[[str], int]) -> str:
    """Return the parts of a source that fit: the last turn, the persona sentences, then turns from the most recent on.

    The last turn always stays. Parts keep their order.

    Args:
        source: of a ``Dialogue``.
        most: tokens there may be.
        count: function that counts the tokens of a part.
    """
    parts = PARTS.split(source)
    rest, kept = most - count(parts[-1]), {len(parts) - 1}
    personas = [i for i, part in enumerate(parts[:-1]) if part.startswith((YOUR, PARTNER))]
    turns = [i for i in range(len(parts) - 2, -1, -1) if i not in personas]
    for wanted in (personas, turns):
        for i in wanted:
            rest -= count(parts[i])
            if rest < 0:
                break
            kept.add(i)
        if rest < 0:
            break
    return " ".join(part for i, part in enumerate(parts) if i in kept)
