"""Tables of pages are what was recorded, and nobody edits them by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenmix.bench.page import MARKED, renew, table

ROOT = Path(__file__).parent.parent
LIMIT = 1.05
"""Above 1 by what the lower quartile of a call and the best of a probe may differ."""
PAGES = ["docs/speed.md"]
MACHINE = {
    "device": "some CPU",
    "cores": 2,
    "threads": 1,
    "torch": "2.13",
    "kernels": {"cpu": "v4"},
    "allocator": "glibc, default settings; transparent huge pages: always",
}


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_those_of_the_recorded_results(page):
    text = (ROOT / page).read_text()
    assert text.count("<!-- speed: ") == len(MARKED.findall(text)) > 0
    assert renew(text, ROOT / "benchmarks" / "results") == text, (
        f"renew it: python -m tokenmix.bench.page benchmarks/results {page}"
    )


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks" / "results").glob("speed_*.json")), ids=lambda file: file.stem
)
def test_no_recorded_share_is_above_its_limit(file):
    over = [
        (r["subject"], r["length"], r["pass"], r["share"])
        for r in json.loads(file.read_text())["rows"]
        if r.get("share", 0.0) > LIMIT
    ]
    assert over == [], f"a limit that is beaten is none: measure {file.stem} again on a machine that does nothing else"


def row(subject: str, seconds: float, **more: object) -> dict[str, object]:
    return {
        "subject": subject,
        "length": "64",
        "pass": "forward",
        "status": "ok",
        "wall_s": seconds,
        "x_sdpa": 0.5 / seconds,
        "share": 0.25,
        "bound": "copy",
        **more,
    }


def test_a_benchmark_becomes_a_table():
    rows = [
        row("sdpa", 0.5),
        row("hydra:causal=false,eps=0", 0.01),
        row("theirs", 0.1, status="wrong", share=None),
        {"subject": "late", "status": "FAILED"},
    ]
    found = {
        "machine": MACHINE,
        "setting": {"level": "op", "batch": 4, "dim": 8, "heads": 2, "dtype": "float32"},
        "rows": rows,
    }
    assert table(found).splitlines() == [
        "*some CPU, 2 cores, 1 threads; torch 2.13; kernels v4; glibc, default settings; "
        "op, batch 4, 8 features, 2 heads, float32*",
        "",
        "|  | 64 |",
        "|---|---|",
        "| `sdpa` | 500 ms |",
        "| `hydra` causal=false eps=0 | **50x** 10.0 ms, 25% of copy |",
        "| `theirs` | **5x** 100 ms, wrong |",
    ]


def test_models_become_tables():
    found = {
        "machine": MACHINE,
        "dtype": "float32",
        "tables": {"T=8": {"ours": {"it/s": 2.0, "ratio_to_fused": 1.5, "peak_MiB": 1234.5}, "unfused": None}},
    }
    assert table(found).splitlines()[2:] == [
        "**T=8**",
        "",
        "|  | steps per second | of fused attention | peak MiB |",
        "|---|---|---|---|",
        "| ours | 2 | 1.50x | 1,234 |",
        "| unfused | does not fit | - | - |",
    ]
