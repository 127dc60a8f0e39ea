"""The page of `tokenmix look sentence` in a real browser: hover, click, keys, steps, languages, wide and narrow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chromium import measured
from tokenmix.lab.explain import explain, write_page
from tokenmix.lab.explain.example import train_example

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
STEPS = 13
DRIVE = (Path(__file__).parent / "explain_drive.html").read_text()


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    models = [("attention", None), ("hydra", {"name": "hydra"})]
    trained = [(name, *train_example(mixer, steps=150)) for name, mixer in models]
    write_page(
        [explain(model, words, "The ball is blue", name) for name, model, words in trained], folder / "page.html"
    )
    return json.loads(measured(folder, DRIVE, tmp_path_factory.mktemp("profile"), timeout=120))


def test_nothing_fails_and_no_step_is_wider_than_the_screen(drive):
    assert drive["errors"] == []
    assert drive["wide"] == []
    assert drive["empty"] == []
    assert [drive[width]["inner"] for width in ("1366", "390")] == [1366, 390]


@pytest.mark.parametrize("width", ["1366", "390"])
def test_buttons_and_arrow_keys_go_through_all_steps(drive, width):
    titles = drive[width]["titles"]
    assert len(set(titles)) == STEPS
    assert drive[width]["back"] == titles[-2]


@pytest.mark.parametrize("width", ["1366", "390"])
def test_a_click_shows_the_product_of_the_cell_and_hover_its_number(drive, width):
    look = drive[width]
    assert look["told"].endswith(f"Together: {look['product']}.")
    shown, hovered = (float(text.replace("−", "-")) for text in (look["product"], look["hover"].rsplit(": ")[-1]))
    assert shown == pytest.approx(hovered, abs=0.006)
    assert look["moved"] == ["2", "TD"], "an arrow key moves inside the matrix and keeps the focus there"


@pytest.mark.parametrize("width", ["1366", "390"])
def test_heads_masks_and_languages(drive, width):
    look = drive[width]
    assert look["other"] != look["product"]
    assert look["head"] == "0"
    rows = int(look["whole"] ** 0.5)
    assert look["hidden"] == rows * (rows - 1) // 2
    assert look["chinese"] == ["zh-CN", "谁可以看谁"]
