"""Reports, demos and sweeps in a real browser: they draw, in light and dark, wide and narrow, and ask nobody."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from chromium import chromium, looks_of
from run_dirs import SPECS, tiny_run
from tokenmix.lab import demo
from tokenmix.lab.report import write_report
from tokenmix.lab.sweep.plan import SweepPlan
from tokenmix.lab.sweep.results import Results
from tokenmix.lab.sweep.sweep_page import write_sweep_page

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return write_report([tiny_run(folder, name) for name in SPECS], folder / "report.html")


def shoot(page, folder, width, *flags):
    """A screenshot and the list of addresses the page itself asked for."""
    shot, log = folder / f"{width}.png", folder / f"{width}.json"
    places = [
        f"--screenshot={shot}",
        f"--log-net-log={log}",
        f"--window-size={width},2400",
    ]
    command = chromium(folder / "profile", *flags, *places, page.as_uri())
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    events = json.loads(log.read_text())["events"]
    asked = {
        e["params"]["url"]
        for e in events
        if "url" in e.get("params", {}) and e["params"].get("initiator") not in (None, "not an origin")
    }
    return Image.open(shot).convert("RGB"), asked


@pytest.mark.parametrize("width", [1200, 500])
def test_page_draws_and_stays_inside(page, tmp_path, width):
    image, asked = shoot(page, tmp_path, width)
    assert image.width == width
    colours = image.getcolors(maxcolors=1 << 24)
    count, paper = max(colours)
    assert paper == (255, 255, 255)
    assert 0.3 < count / (image.width * image.height) < 0.99
    assert any(b - r > 60 for _, (r, _, b) in colours), "no blue curve was drawn"
    assert {a for a in asked if not a.startswith(("file:", "data:"))} == set()


def test_page_is_dark_for_who_asks(page, tmp_path):
    image, _ = shoot(page, tmp_path, 900, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
    assert max(image.getcolors(maxcolors=1 << 24))[1] == (20, 23, 26)


@pytest.fixture(scope="module")
def pages(page, tmp_path_factory):
    """A report, a demo and the page of a sweep in one folder."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copy(page, folder / "report.html")
    sizes = {"dim": 16, "layers": 4, "seq_len": 32, "batch_size": 2, "eval_bytes": 600, "sample_bytes": 8}
    plan = demo.Plan(steps=9, trial_seconds=1.0, contexts=(16, 64), **sizes)
    shutil.copy(demo.demo(folder / "demo", plan), folder / "demo.html")
    sweep = SweepPlan.from_json(json.loads((BENCHMARKS / "sweeps" / "aft_parts.json").read_text()))
    results = Results.open(BENCHMARKS / "results" / "aft_parts.json", sweep)
    write_sweep_page(results, [], folder / "sweep.html", refresh=None)
    return folder


def test_no_page_is_wider_than_a_telephone(pages, tmp_path):
    names = ["report.html", "demo.html", "sweep.html"]
    looks = looks_of(pages, names, (1366, 390), tmp_path / "profile", room="main")
    assert {look["inner"] for look in looks.values()} == {1366, 390}
    assert len(looks) == 2 * len(names)
    assert not {name: look for name, look in looks.items() if look["wide"] > look["inner"] or look["spills"]}
    assert not {name: look["broken"] for name, look in looks.items() if look["broken"]}
