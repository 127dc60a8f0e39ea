"""Define the hook of mkdocs that shows the tables of ``benchmarks/efficiencies.py`` where a page asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "results" / "efficiencies.json"
MARK = re.compile(r"<!-- efficiencies (\w+) -->")
"""A page asks for a table by its name in ``TABLES``."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables where the page asks for them."""
    return MARK.sub(lambda found: table(json.loads(RECORD.read_text()), found[1]), markdown)


def table(record: dict[str, Any], name: str) -> str:
    """Return a table as Markdown, or the command that measures it if it has not been measured yet."""
    part, head, rows = TABLES[name]
    if part not in record:
        return "*Not measured yet*: `python -m benchmarks.efficiencies --out DIR --record` does it.\n"
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(cells) for mixer, found in record[part].items() for cells in rows(f"`{mixer}`", found)]
    return "\n".join(f"| {line} |" for line in lines)


def _shared(mixer: str, found: dict[str, Any]) -> Iterator[list[str]]:
    for row, each in found.items():
        yield [mixer, row, f"{each['parameters']:,}", f"{each['bits']:.3f}"]


def _int8(mixer: str, found: dict[str, Any]) -> Iterator[list[str]]:
    scores = (f"{found[name]:.4f}" for name in ("bits", "int8_bits", "rounded_bits"))
    yield [mixer, f"{found['bytes']:,}", f"{found['int8_bytes']:,}", *scores]


def _drift(mixer: str, found: dict[str, Any]) -> Iterator[list[str]]:
    for tokens, each in found["drift"].items():
        distances = (f"{each[name]:.3f}" for name in ("logits", "states"))
        yield [mixer, f"{int(tokens):,}", f"{each['bits']:.4f}", f"{each['int8_bits']:.4f}", *distances]


def _lora(mixer: str, found: dict[str, Any]) -> Iterator[list[str]]:
    names = {"before": "nothing", "lora": "LoRA", "all weights": "all weights"}
    for row, each in found.items():
        yield [mixer, names[row], f"{each['trainable']:,}", f"{each['bits']:.3f}", f"{each['bits_before']:.3f}"]


def _bfloat16(mixer: str, found: dict[str, Any]) -> Iterator[list[str]]:
    names = {"fp32": "float32", "bf16": "bfloat16"}
    for row, each in found.items():
        yield [mixer, names[row], *(f"{each[precision]:.4f}" for precision in names)]


Rows = Callable[[str, dict[str, Any]], Iterator[list[str]]]
TABLES: dict[str, tuple[str, list[str], Rows]] = {
    "shared": ("shared", ["mixer", "blocks", "parameters", "bits per byte"], _shared),
    "int8": (
        "int8",
        ["mixer", "bytes of weights", "with int8", "bits per byte", "with int8", "weights alone rounded"],
        _int8,
    ),
    "drift": (
        "int8",
        ["mixer", "after tokens", "bits per byte", "with int8", "distance of logits", "distance of states"],
        _drift,
    ),
    "lora": ("lora", ["mixer", "adapted by", "trained parameters", "English", "Python"], _lora),
    "bfloat16": ("bfloat16", ["mixer", "trained in", "scored in float32", "scored in bfloat16"], _bfloat16),
}
