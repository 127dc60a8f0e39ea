"""Tables of pages are what was recorded, and nobody edits them by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tokenmix.lab.bench.bench_page import MARKED, renew, table
from tokenmix.lab.bench.plot import plot

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
        f"renew it: python -m tokenmix.lab.bench.bench_page benchmarks/results {page}"
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
    assert table(found, "some").splitlines() == [
        "|  | 64 |",
        "|---|---|",
        "| `sdpa` | 500 ms |",
        "| `hydra` causal=false eps=0 | 50x |",
        "| `theirs`, *wrong* | 5x |",
        "",
        "Times as fast as `sdpa`, whose row is its own time.[^some]",
        "",
        '??? note "Times and shares of the limit"',
        "",
        "    Milliseconds:",
        "",
        "    |  | 64 |",
        "    |---|---|",
        "    | `sdpa` | 500 |",
        "    | `hydra` causal=false eps=0 | 10 |",
        "    | `theirs`, *wrong* | 100 |",
        "",
        "    Per cent of the limit of the machine, `copy`:",
        "",
        "    |  | 64 |",
        "    |---|---|",
        "    | `sdpa` | 25 |",
        "    | `hydra` causal=false eps=0 | 25 |",
        "    | `theirs`, *wrong* | - |",
        "",
        "[^some]: some CPU, 2 cores, 1 threads; torch 2.13; kernels v4; glibc, default settings; "
        "op, batch 4, 8 features, 2 heads, float32.",
    ]


def test_limits_of_several_kinds_are_named():
    rows = [row("a", 0.1), row("b", 0.1, bound="gemm")]
    setting = {"level": "op", "batch": 4, "dim": 8, "heads": 2, "dtype": "float32"}
    found = table({"machine": MACHINE, "setting": setting, "rows": rows}, "some")
    assert "limit of the machine, by row `copy` or `gemm`:" in found


def test_models_become_tables():
    found = {
        "machine": MACHINE,
        "dtype": "float32",
        "tables": {"T=8": {"ours": {"it/s": 2.0, "ratio_to_fused": 1.5, "peak_MiB": 1234.5}, "unfused": None}},
    }
    assert table(found, "some").splitlines()[:-1] == [
        "**T=8**[^some]",
        "",
        "|  | of fused attention | steps per second | peak MiB |",
        "|---|---|---|---|",
        "| ours | 1.50x | 2 | 1,234 |",
        "| unfused | does not fit | - | - |",
        "",
    ]


def test_models_of_images_become_a_table():
    passes = {"inference": (120.0, 1.0, 99.6), "training": (30.55, 0.5, 1234.5)}
    figures = {
        f"{which}_{name}": value
        for which, values in passes.items()
        for name, value in zip(("images_per_s", "ratio", "peak_MiB"), values, strict=True)
    }
    model = {"parameters": 5_717_416, "giga_macs": 1.2536, **figures}
    found = {"machine": MACHINE, "setting": "batch 8", "images": {"deit_tiny": model}}
    assert table(found, "some").splitlines()[:3] == [
        "|  | inference | inference, MiB | training | training, MiB | parameters, M | multiply-accumulates, G |",
        "|---|---|---|---|---|---|---|",
        "| `deit_tiny` | 120 / s | 100 | 0.50x | 1,234 | 5.7 | 1.25 |",
    ]


def test_the_legend_of_a_plot_stands_beside_its_lines_in_their_order(tmp_path, monkeypatch):
    rows = [
        row("aft_local:window=32", 0.2, T=64, name="aft_local", options={"window": 32}),
        row("aft_local:window=32", 0.8, T=128, name="aft_local", options={"window": 32}),
        row("sdpa", 0.1, T=64, name="sdpa", options={}),
        row("sdpa", 0.9, T=128, name="sdpa", options={}),
        row("hydra:causal=false", 0.3, T=64, name="hydra", options={"causal": False}),
        row("hydra:causal=false", 0.4, T=128, name="hydra", options={"causal": False}, status="wrong"),
    ]
    fits = [{"subject": "sdpa", "pass": "forward", "exponent": 3.17}]
    setting = {"level": "op", "batch": 4, "dim": 8, "dtype": "float32"}
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: drawn.append(figure) or save(figure, *a, **k))
    plot({"rows": rows, "fits": fits, "setting": setting, "machine": MACHINE}, tmp_path / "plot.png")
    (ax,) = drawn[0].axes
    legend = ax.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        "fused attention (sdpa):  3.17",
        "aft_local, window 32",
        "hydra, not causal (wrong)",
    ]
    colours = {line.get_label(): line.get_color() for line in ax.lines}
    assert [line.get_color() for line in legend.get_lines()] == [colours[t.get_text()] for t in legend.get_texts()]
    beside, right = legend.get_window_extent(), drawn[0].bbox.x1
    assert ax.get_window_extent().x1 <= beside.x0 < beside.x1 <= right
