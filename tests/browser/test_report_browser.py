"""The report in a real browser: it draws, in light and dark, wide and narrow, and asks nobody for anything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from PIL import Image

from run_dirs import SPECS, tiny_run
from tokenmix.report import write_report

pytestmark = pytest.mark.browser
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return write_report([tiny_run(folder, name) for name in SPECS], folder / "report.html")


def shoot(page, folder, width, *flags):
    """A screenshot and the list of addresses the page itself asked for."""
    browser = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    assert browser, "no chromium on this machine: install Debian's package chromium"
    shot, log = folder / f"{width}.png", folder / f"{width}.json"
    places = [
        f"--user-data-dir={folder / 'profile'}",
        f"--screenshot={shot}",
        f"--log-net-log={log}",
        f"--window-size={width},2400",
    ]
    subprocess.run([browser, *QUIET, *flags, *places, page.as_uri()], check=True, capture_output=True, timeout=120)
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
