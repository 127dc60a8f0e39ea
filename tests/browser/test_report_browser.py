"""The report in a real browser: it draws, in light and dark, wide and narrow, and asks nobody for anything."""

from __future__ import annotations

import json
import subprocess

import pytest
from PIL import Image

from chromium import chromium
from run_dirs import SPECS, tiny_run
from tokenmix.lab.report import write_report

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
