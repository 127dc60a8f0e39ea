"""Checks of arguments that several verbs take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import MixerError


def parse_object(given: str, example: str, who: str = "") -> dict[str, Any]:
    """Return the JSON object in ``--options``; ``who`` begins the error message, which shows ``example``."""
    try:
        found = json.loads(given)
    except ValueError as why:
        raise MixerError(f"{who}--options is not JSON ({why}), got {given!r}; write it like '{example}'.") from None
    if not isinstance(found, dict):
        raise MixerError(f"{who}--options must be a JSON object, got {given!r}.")
    return found


def check_folder(verb: str, file: Path | None) -> None:
    """Refuse an output file whose folder does not exist, before time is spent."""
    if file is not None and not file.parent.is_dir():
        raise MixerError(f"{verb}: the folder {file.parent} of {file.name} does not exist; give one that exists.")
