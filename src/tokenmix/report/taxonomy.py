"""The table of mixers as Markdown: class, paper, cost, causal, state, and what was measured. The docs put it on their page of mixers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .._info import state_growth
from ..mixers import CORE, MIXERS

MARK = "<!-- mixers -->"
NOTES = "Bits per byte and tokens per second: the same small causal language model with each mixer, on one CPU thread (`benchmarks/mixers_small.py`)."


def taxonomy(results: Path, pages: Path) -> str:
    """One table for the core and one for the opponents.

    Args:
        results: the JSON of ``benchmarks/mixers_small.py``; columns of measurements stay empty where it is missing.
        pages: the folder with the mixers' pages.
    """
    measured: dict[str, Any] = json.loads(results.read_text())["rows"] if results.is_file() else {}
    parts = []
    for title, names in (("Core", [n for n in MIXERS if n in CORE]), ("Opponents", [n for n in MIXERS if n not in CORE])):
        head = "| mixer | class | paper | time | space | causal | state | bits per byte | tokens/s |"
        rows = [_row(name, measured.get(name), pages) for name in names]
        parts += [f"## {title}", "", head, "|---" * 9 + "|", *rows, ""]
    return "\n".join([*parts, NOTES])


def _row(name: str, measured: dict[str, Any] | None, pages: Path) -> str:
    cls = MIXERS[name]
    stem = cls.__module__.split(".")[-1]
    page = next((p for p in (stem, stem.split("_")[0]) if (pages / f"{p}.md").is_file()), None)
    link = f"[`{name}`]({page}.md)" if page else f"`{name}`"
    bits, rate = (f"{measured['valid_bits_per_byte']:.3f}", f"{measured['tokens_per_s']:,.0f}") if measured else ("", "")
    kind, time, space = (text.replace("^2", "²") for text in (cls.about.kind, cls.about.time, cls.about.space))
    paper = cls.about.paper.split(", arXiv")[0]
    return f"| {link} | {kind} | {paper} | {time} | {space} | {'yes' if cls.supports_causal else 'no'} | {state_growth(name)} | {bits} | {rate} |"
