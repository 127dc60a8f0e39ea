"""Implement `tokenmix advise`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..bench.command import progress
from ..errors import MixerError
from ..system.machine import pick_device
from .advice import advise
from .distill import check_distillation, distill_fastest
from .loading import load_host
from .text import as_json, text

LENGTH = re.compile(r"([1-9]\d*)(k?)", re.IGNORECASE)


def parse_lengths(given: str) -> list[int]:
    """Parse lengths: "256,1k,4k" -> [256, 1024, 4096]."""
    found = []
    for piece in filter(None, (p.strip() for p in given.split(","))):
        match = LENGTH.fullmatch(piece)
        if match is None:
            raise MixerError(f"advise: --lengths takes numbers of tokens, or sides of images, such as 256,1k,4k, got {piece!r}.")
        found.append(int(match[1]) * (1024 if match[2] else 1))
    if not found:
        raise MixerError("advise: --lengths is empty; write 256,1k,4k.")
    return sorted(set(found))


def parse_options(given: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        found = json.loads(given)
    except ValueError as why:
        raise MixerError(f"advise: --options is not JSON ({why}), got {given!r}; write '{{\"max_position_embeddings\": 4096}}'.") from None
    if not isinstance(found, dict):
        raise MixerError(f"advise: --options must be a JSON object, got {given!r}.")
    return found


def advise_command(
    model: str,
    *,
    lengths: str | None,
    batch: int,
    seconds: float,
    worth: float,
    candidates: str | None,
    options: str,
    device: str,
    data: Path | None,
    minutes: float,
    last: int | None,
    write: Path | None,
    out: Path | None,
    json_to_stdout: bool,
) -> int:
    """Load, measure, distil, print, write the page."""
    wanted = None if lengths is None else parse_lengths(lengths)
    if out is not None and not out.parent.is_dir():
        raise MixerError(f"advise: the folder {out.parent} of {out.name} does not exist.")
    tell = progress()
    tell(f"loading {model}")
    given = parse_options(options)
    device = pick_device(device).type
    host = load_host(model, given, device=device)
    if data is not None:
        check_distillation(host.name, host.origin, data, write)
        candidates = candidates or "auto"
    if not minutes > 0:
        raise MixerError(f"advise: --minutes must be positive, got {minutes}.")
    found = advise(host, wanted, batch=batch, seconds=seconds, worth=worth, candidates=candidates, device=device, tell=tell)
    if data is not None and write is not None:
        tell(f"distilling for {minutes:g} minutes")
        found.distilled = distill_fastest(found, data, write, minutes=minutes, last=last)
    tell("")
    print(json.dumps(as_json(found), indent=1) if json_to_stdout else text(found))
    if out is not None:
        from .page import write_page

        write_page(found, out)
    return 0
