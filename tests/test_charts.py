"""Charts and the gallery show what was recorded; names in charts cover nothing."""

from __future__ import annotations

import itertools
import json
from xml.etree import ElementTree

import pytest

import charts
import gallery
from notebooks import NOTEBOOKS, ROOT


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_chart_is_that_of_the_recorded_results(name):
    drawn = charts.CHARTS[name]()
    assert (charts.FOLDER / f"{name}.svg").read_text() == drawn, "draw it anew: make tables"
    ElementTree.fromstring(drawn)


def test_no_chart_is_left_over_and_each_is_on_a_page():
    assert {path.stem for path in charts.FOLDER.iterdir()} == set(charts.CHARTS)
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert all(f"assets/charts/{name}.svg)" in pages for name in charts.CHARTS)


@pytest.mark.parametrize("name", charts.CHARTS)
def test_every_text_of_a_chart_is_inside_it(name):
    root = ElementTree.fromstring(charts.CHARTS[name]())
    _, _, width, height = map(float, root.get("viewBox").split())
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, wide = float(text.get("x")), 0.5 * 15 * len(text.text)  # half a letter's height is a mean letter's width
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[text.get("text-anchor", "start")]
        assert 0 <= left < left + wide <= width, text.text
        assert 0 < float(text.get("y")) <= height


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
