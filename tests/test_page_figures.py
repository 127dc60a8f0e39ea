"""The decimals of every table on a page are from a result file, from a paper, or from what a test computes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

from tokenmix.lab.papers.ours import measured_sweep

ROOT = Path(__file__).parents[1]
FEW = 4
"""A table with fewer decimals than these is prose in columns."""
FROM_FILES = {
    "anatomy: mixer | registers": "vit_anatomy",
    "anatomy: mixer | outliers": "converged_vit",
    "encoder-decoders: row | training": "translation_speed",
    "hosts/advise: model | length": "retime_advice",
    "hosts/surgery: last layer": "surgery_bert",
    "kernels: us per token": "recurrence",
    "positions: within": "extrapolation",
    "scale: mixer | one process": "million_tokens",
    "scale: bytes per chunk": "long_gradient",
    "vision: mixer | 32": "converged_vit",
    "vision: start | top-1": "livt_small",
}
"""Tables, by page and the beginning of their first row, and the file of ``benchmarks/results`` with their decimals."""
FROM_THE_LOG = {"positions: within": {"2.729", "2.953", "4.786", "4.516"}}
"""Decimals of these tables that LOG.md has, of one seed: ways to stretch positions, which no sweep trains."""
FROM_ELSEWHERE = {
    "bodies": "test_transhuman.py compares them with the file",
    "claims": "test_papers.py writes the page anew",
    "speed": "test_bench_page.py writes them anew",
    "robustness": "what attempts printed, before and after",
    "how-to-choose-a-mixer": "sentences in columns, with links to the pages of their figures",
    "mixers/aft_forget": "numbers of sections in papers",
    "mixers/attention": "options",
    "mixers/hydra": "test_hydra.py computes them",
    "positions: name": "numbers of papers",
    "scale: mixer | one carry": "formulas, which test_parallel.py compares with what is sent",
    "vision: image | T": "test_macs.py computes them",
    "vision: model | parameters": "test_macs.py computes them",
    "writing": "timed by `python -m benchmarks.speculation`, which keeps no file",
}
"""Pages, or tables, whose decimals are from elsewhere, and what checks them."""


def tables_of(page: Path) -> list[tuple[str, str]]:
    """Return the tables of a page with decimals: page and beginning of the first row, and the text."""
    name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
    tables = re.findall(r"(?m)^(?:\|.*\n)+", page.read_text(encoding="utf-8"))
    return [(f"{name}: {text.lstrip('| ')}", text) for text in tables if len(decimals(text)) >= FEW]


def decimals(text: str) -> list[str]:
    """Return the decimals of a table, without those in code, in formulas, in its head and in the column of names."""
    bare = re.sub(r"\A.*\n|`[^`]*`|\$[^$]*\$|(?m:^\|[^|]*)", "", text)
    return re.findall(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.])", bare)


def numbers_of(value: object) -> list[float]:
    """Return all numbers in a JSON value."""
    if isinstance(value, (dict, list)):
        return [n for part in (value.values() if isinstance(value, dict) else value) for n in numbers_of(part)]
    return [float(value)] if isinstance(value, (int, float)) else []


def numbers_in(name: str) -> list[float]:
    """Return the numbers of a result file; of a sweep its scores, with mean and deviation of the seeds."""
    if (sweep := measured_sweep(name)) is not None:
        pairs = [(row, key) for row in sweep.plan.rows for key in ("score", "beyond")]
        seeds = [[run[key] for run in sweep.finals(row) if run.get(key) is not None] for row, key in pairs]
        many = [values for values in seeds if len(values) > 1]
        return [*itertools.chain(*seeds), *map(mean, many), *map(stdev, many)]
    found = json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())
    ratios = [
        other["us"] / row["least"]["tokenmix"]["us"]
        for row in (found["rows"] if name == "recurrence" else [])
        for other in row["least"].values()
    ]
    return numbers_of(found) + ratios


def is_rounded(written: str, numbers: list[float]) -> bool:
    """Return whether a decimal is one of the numbers, or a number in per cent, to as many places."""
    bare = written.replace(",", "")
    half = 0.5001 * 10.0 ** -len(bare.split(".")[1])
    return any(abs(number * unit - float(bare)) <= half for number in numbers for unit in (1, 100))


ALL = [each for page in sorted((ROOT / "docs").rglob("*.md")) for each in tables_of(page)]


def test_every_table_with_decimals_has_its_source():
    known = (*FROM_FILES, *FROM_ELSEWHERE)
    assert [where[:80] for where, _ in ALL if not where.startswith(known)] == []
    assert [start for start in known if not any(where.startswith(start) for where, _ in ALL)] == []
    tests = re.findall(r"test_\w+\.py", " ".join(FROM_ELSEWHERE.values()))
    assert [test for test in tests if not (ROOT / "tests" / test).is_file()] == []


@pytest.mark.parametrize("start", FROM_FILES)
def test_the_decimals_of_a_table_are_those_of_its_file(start):
    numbers = numbers_in(FROM_FILES[start])
    (text,) = (text for where, text in ALL if where.startswith(start))
    unknown = {written for written in decimals(text) if not is_rounded(written, numbers)}
    assert unknown <= FROM_THE_LOG.get(start, set())
    assert [written for written in unknown if written not in (ROOT / "LOG.md").read_text(encoding="utf-8")] == []
