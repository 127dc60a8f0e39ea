"""Our values: computed anew, or as recorded in ``ours.json``, which `make tables` writes and a test computes again."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .claim import Claim, Paper, Value

RECORD = Path(__file__).parent / "ours.json"
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


@cache
def _record() -> dict[str, dict[str, Value]]:
    found: dict[str, dict[str, Value]] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return found


def recorded(paper: Paper) -> dict[str, Value]:
    """Return our recorded values of a paper's numbers, by "section: name"."""
    return _record().get(paper.key, {})


def computed(paper: Paper, claims: tuple[Claim, ...] | None = None) -> dict[str, Value]:
    """Compute our values of a paper's numbers, or of some of its claims. Torch's generator is left as it was."""
    found: dict[str, Value] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for claim in paper.claims if claims is None else claims:
            for number in claim.numbers:
                if number.measure is not None:
                    found[f"{claim.section}: {number.name}"] = _plain(number.measure())
    return found


def _plain(value: Value) -> Value:
    """Round a value to nine digits, so that a record does not depend on the machine's last bit."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


def measured_elsewhere(result: str) -> float | None:
    """Look up a value of a file in ``benchmarks/results``: "file.json:key/key"; None outside of a checkout."""
    name, _, keys = result.partition(":")
    if not (RESULTS / name).is_file():
        return None
    found: Any = json.loads((RESULTS / name).read_text())
    for key in keys.split("/"):
        found = found[key]
    return float(found)


def write(papers: tuple[Paper, ...], file: Path = RECORD) -> dict[str, dict[str, Value]]:
    """Compute every value and write the record."""
    found = {paper.key: computed(paper) for paper in papers}
    file.write_text(json.dumps(found, indent=1) + "\n")
    _record.cache_clear()
    return found
