"""Lines of JSON as a run writes them; lines damaged by a kill or a disk are skipped."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ...types import Record

LARGEST = 1 << 63
LARGEST_FLOAT = 1e150
"""The largest finite number of a metric: the axes of a curve square their range."""
Bad = tuple[int, bytes]  # number of a line, from 1, and its content


def read_records(path: Path) -> tuple[list[Record], list[Bad]]:
    """Return the lines of a file that are metrics of a step, and those that are not.

    A last line without its newline is in neither list: it is still being written.
    """
    return parse_records(path.read_bytes()) if path.is_file() else ([], [])


def parse_records(content: bytes, first: int = 1) -> tuple[list[Record], list[Bad]]:
    """Return the same for bytes that begin with line ``first`` of a file."""
    good: list[Record] = []
    bad: list[Bad] = []
    for number, raw in enumerate(content.split(b"\n")[:-1], first):
        record = _record(raw)
        if record is not None:
            good.append(record)
        elif raw.strip():
            bad.append((number, raw))
    return good, bad


def _record(raw: bytes) -> Record | None:
    try:
        value = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _is_complete(value) else None


def _is_complete(record: Record) -> bool:
    """Return whether a record has what all readers rely on.

    That is a step, a kind, the field that belongs to this kind, and numbers everywhere else.
    """
    step, needs = record.get("step"), {"train": "loss", "eval": "split"}.get(str(record.get("kind")), "kind")
    if type(step) is not int or step < 0 or needs not in record:
        return False
    shapes: dict[str, type | tuple[type, ...]] = {
        "kind": str,
        "split": str,
        "phase": str,
        "aux": dict,
        "layer_loss": dict,
        "quality": dict,
        "by_context": dict,
        "scaling": dict,
        "image_size": list,
        "by_noise": dict,
        "iou": dict,
        "names": list,
        "signature": str,
        "grid": list,
    }
    return all(
        isinstance(v, shapes[k]) if k in shapes else _drawable(v) or (type(v) is int and abs(v) < LARGEST)
        for k, v in record.items()
    )


def _drawable(value: object) -> bool:
    """Return whether a value is a float that a curve can be drawn of, or not finite, which curves leave out."""
    return type(value) is float and not LARGEST_FLOAT < abs(value) < math.inf


def bad_text(bad: list[Bad]) -> str:
    """Describe how many lines cannot be read, and which is the first."""
    return (
        f"{len(bad)} {'line' if len(bad) == 1 else 'lines'} cannot be read (the first: "
        + f"line {bad[0][0]}, {bad[0][1][:40]!r})"
    )
