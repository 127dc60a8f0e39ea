"""Checks of arguments that several verbs take."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MixerError
from ...types import Options

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


LENGTH = re.compile(r"([1-9]\d*)(k?)", re.IGNORECASE)


def parse_object(given: str, example: str, who: str = "", option: str = "options") -> Options:
    """Return the JSON object in ``--option``; ``who`` begins the error message, which shows ``example``."""
    try:
        found = json.loads(given)
    except ValueError as why:
        raise MixerError(f"{who}--{option} is not JSON ({why}), got {given!r}; write it like '{example}'.") from None
    if not isinstance(found, dict):
        raise MixerError(f"{who}--{option} must be a JSON object, got {given!r}.")
    return found


def check_folder(verb: str, file: Path | None) -> None:
    """Refuse an output file whose folder does not exist, before time is spent."""
    if file is not None and not file.parent.is_dir():
        raise MixerError(f"{verb}: the folder {file.parent} of {file.name} does not exist; give one that exists.")


def given_options(verb: DataclassInstance, known: set[str]) -> list[str]:
    """Return the options beside the known ones whose value is not the default, as they are typed."""
    others = [f for f in fields(verb) if f.name not in known]
    return [f"--{f.name.replace('_', '-')}" for f in others if getattr(verb, f.name) != f.default]


def parse_lengths(given: str, verb: str) -> list[int]:
    """Return the lengths in "256,1k,4k", sorted: [256, 1024, 4096]."""
    found = []
    for piece in filter(None, (p.strip() for p in given.split(","))):
        match = LENGTH.fullmatch(piece)
        if match is None:
            raise MixerError(
                f"{verb}: --lengths takes numbers of tokens, or sides of images, such as 256,1k,4k, got {piece!r}."
            )
        found.append(int(match[1]) * (1024 if match[2] else 1))
    if not found:
        raise MixerError(f"{verb}: --lengths is empty; write 256,1k,4k.")
    return sorted(set(found))
