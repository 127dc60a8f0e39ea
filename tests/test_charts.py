"""Charts and the gallery show what was recorded; names in charts cover nothing."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import charts
import gallery
from notebooks import NOTEBOOKS, ROOT
from tokenmix.lab.papers.ours import measured_sweep


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_chart_is_that_of_the_recorded_results(name):
    drawn = charts.CHARTS[name]()
    assert (charts.FOLDER / f"{name}.svg").read_text() == drawn, "draw it anew: make tables"
    ElementTree.fromstring(drawn)


def test_no_chart_is_left_over_and_each_is_on_a_page():
    assert {path.stem for path in charts.FOLDER.iterdir()} == set(charts.CHARTS)
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    assert all(re.search(rf'assets/charts/{name}\.svg[)"]', pages) for name in charts.CHARTS)


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/index.md"])
def test_the_words_of_the_first_picture_are_those_of_the_results(page):
    text, said = (ROOT / page).read_text(), charts.describe_quality_against_state()
    if page.endswith(".zh.md"):
        (alt,) = re.findall(r'<img alt="([^"]*)"', text)
        assert re.findall(r"R=\d+|[\d.]+(?: [KM]iB)?", alt) == re.findall(r"R=\d+|\d[\d.]*(?: [KM]iB)?", said)
    else:
        assert f'<img alt="{said}"' in text or f"![{said}]" in text
    if page.startswith("README"):
        assert 'srcset="docs/assets/charts/quality_state_narrow.svg"' in text


def test_every_figure_of_quality_and_speed_in_the_readme_is_from_a_result():
    """The other figures are counts, which tests/test_counts_in_prose.py has, lengths, and minutes of commands."""
    sweep = measured_sweep("enwik8_10m")
    size = round(sweep.finals("attention")[0]["parameters"], -6)
    attention, forget = (sweep.scores(row)[0] for row in ("attention", "aft_forget"))
    models = json.loads((charts.RESULTS / "whole_models_lm.json").read_text())["tables"]["T=4096, batch 1"]
    ratios = [models[name]["ratio_to_fused"] for name in ("aft_local 32", "aft_simple", "hydra")]
    times = json.loads((charts.RESULTS / "nvidia_h200.json").read_text())["times"]
    both = {row["form"]: row["both"] for row in times if row["T"] == 4096 and "both" in row}
    best = min(ms for form, ms in both.items() if form.startswith("sdpa")) / both["aft_simple causal"]
    low, high, gpu = f"{min(ratios):.1f}", f"{max(ratios):.1f}", f"{best:.1f}"
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
    assert attention < forget
    assert re.search(
        rf"\[a model of {size // 10**6:.0f} million parameters\].*attention is ahead of AFT-forget\.", english
    )
    assert f"{low} to {high} times as fast with AFT-local, AFT-simple or Hydra" in english
    assert f"AFT-simple is {gpu} times as fast as the best softmax attention at 4,096 tokens" in english
    assert f"{size / 1e4:,.0f} 万参数" in chinese
    assert [number for number in (f"{low} 至 {high} 倍", f"{gpu} 倍") if number not in chinese] == []


def test_what_the_readme_says_of_the_first_picture_holds():
    quality, recall = ({dot.name: dot for dot in dots} for dots in (charts.quality_dots(), charts.recall_dots()))
    attention, near = quality["attention"], [quality[name] for name in ("AFT-forget", "AFT-conv", "AFT-local")]
    assert all(dot.x < attention.x / 100 and dot.y - attention.y < 0.1 for dot in near)
    assert max(dot.y for dot in recall.values() if dot.group == "AFT") < 0.8
    delta = recall["DeltaNet, KDA"]
    assert delta.low > 0.95
    assert delta.x < max(dot.x for dot in recall.values() if dot.group == "AFT")


@pytest.mark.parametrize("name", charts.CHARTS)
def test_every_text_of_a_chart_is_inside_it(name):
    root, space = ElementTree.fromstring(charts.CHARTS[name]()), "{http://www.w3.org/2000/svg}"
    _, _, width, height = map(float, root.get("viewBox").split())
    for group in (root, *root.iter(f"{space}g")):
        right, down = map(float, re.findall(r"[\d.]+", group.get("transform", "0 0")))
        for text in group.findall(f"{space}text"):
            x, wide = right + float(text.get("x")), 0.5 * 15 * len(text.text)  # a mean letter is half as wide as high
            left = {"start": x, "middle": x - wide / 2, "end": x - wide}[text.get("text-anchor", "start")]
            assert 0 <= left < left + wide <= width, text.text
            assert 0 < down + float(text.get("y")) <= height


def test_names_cover_neither_names_nor_points():
    points = [(100.0, 100.0), (104.0, 112.0), (104.0, 90.0), (150.0, 100.0)]
    room = (0.0, 0.0, 400.0, 200.0)
    boxes = charts.place_names(points, ["one", "two", "three", "four"], 15, room)
    dots = [(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    for one, other in itertools.chain(itertools.combinations(boxes, 2), itertools.product(boxes, dots)):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)
    with pytest.raises(ValueError, match="no room for the name 'a long name'"):
        charts.place_names([(10.0, 10.0)], ["a long name"], 15, (0.0, 0.0, 50.0, 50.0))


def test_a_page_holds_its_chart_inline_in_the_colours_of_the_page():
    page = '<p><img alt="some words" src="../assets/charts/speed.svg" /> <img alt="" src="assets/other.svg" /></p>'
    shown = charts.on_page_content(page)
    assert '<svg role="img" aria-label="some words" ' in shown
    assert "<style>" not in shown
    assert "assets/other.svg" in shown


def test_the_gallery_lists_every_example_with_its_time():
    folders = {path.parent for path in (ROOT / "examples").glob("*/__main__.py")}
    files = {path.stem: path.name for path in (*(ROOT / "examples").glob("*.py"), *folders)}
    programs = set(files)
    assert set(gallery.PROGRAMS) == programs
    assert set(gallery.SHOWS) == set(NOTEBOOKS)
    record = json.loads(gallery.RECORD.read_text())
    assert set(record["seconds"]) == programs | set(NOTEBOOKS.values()), "measure it: python benchmarks/gallery.py"
    shown = gallery.tables(record)
    assert all(f"| `examples/{file}` |" in shown for file in files.values())
    assert all(f"| `examples/{name}.ipynb` |" in shown for name in NOTEBOOKS.values())


def test_the_chart_of_long_sequences_shows_each_mean_of_each_task_that_was_run(monkeypatch):
    runs = [{"score": score, "cpu_seconds": 20.0, "steps": 400, "peak_mib": 1234.4} for score in (0.5, 0.52)]
    plan = SimpleNamespace(rows={"attention": {}, "linear": {}, "hydra": {}})
    of_rows = {"attention": runs, "linear": runs[:1]}
    found = SimpleNamespace(plan=plan, finals=lambda row: of_rows.get(row, []))
    monkeypatch.setattr(charts, "measured_sweep", lambda name: found if name == "long_range_retrieval" else None)
    said = [text.text for text in ElementTree.fromstring(charts.draw_long_range()).iter() if text.tag.endswith("text")]
    assert said[:3] == ["retrieval", "attention", "linear"]
    assert sorted(said[3:]) == sorted(
        ["accuracy, %", "51", "50", "ms per step", "50", "50", "memory, MiB", *["1,234"] * 2]
    )
    monkeypatch.setattr(charts, "measured_sweep", lambda name: found)
    test_every_text_of_a_chart_is_inside_it("long_range")
