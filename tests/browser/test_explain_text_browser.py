"""The pages of `tokenmix look sentence` of language models and of an encoder in a real browser, wide and narrow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chromium import measured
from tokenmix.lab.explain import explain, write_page
from tokenmix.lab.explain.characters import Bytes
from tokenmix.models import EncoderConfig, LMConfig, build_model

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
DRIVE = (Path(__file__).parent / "explain_text_drive.html").read_text()
TEXT = "To be or not to"
STEPS = [
    "tokens",
    "embed",
    "positions",
    "qkv",
    "products",
    "mask",
    "softmax",
    "sum",
    "heads",
    "layers",
    "words",
    "mixers",
    "answers",
]
MIXERS = {
    "attention": {"name": "attention", "heads": 2},
    "aft_local": {"name": "aft_local", "window": 4},
    "hydra": {"name": "hydra"},
    "external": {"name": "external", "slots": 4},
    "linear": {"name": "linear", "heads": 2},
    "synthesizer": {"name": "synthesizer_mixture", "heads": 2},
    "convolution": {"name": "dynamicconv", "heads": 2, "kernel_size": 5},
    "forget": {"name": "aft_forget"},
}


class Hiding(Bytes):
    """Bytes, one of which hides others; the first of the text counts as one that says where it begins."""

    mask = 0
    framing = (ord(TEXT[0]),)


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    torch.manual_seed(0)
    options = {"dim": 16, "max_len": 48, "layers": 2, "init_std": 0.4}
    models = [build_model(LMConfig(mixers=(spec,), **options)).eval() for spec in MIXERS.values()]
    write_page(
        [explain(model, Bytes(), TEXT, name) for name, model in zip(MIXERS, models, strict=True)], folder / "lm.html"
    )
    specs = (MIXERS["attention"], MIXERS["external"])
    encoder = build_model(EncoderConfig(mixers=specs, **options)).eval()
    write_page([explain(encoder, Hiding(), TEXT, "encoder")], folder / "encoder.html")
    return json.loads(measured(folder, DRIVE, tmp_path_factory.mktemp("profile"), timeout=200))


def test_nothing_fails_and_no_step_is_wider_than_the_screen(drive):
    assert drive["errors"] == []
    assert drive["wide"] == []
    assert drive["empty"] == []


@pytest.mark.parametrize("width", ["1366", "390"])
def test_a_language_model_has_its_own_steps_and_no_places(drive, width):
    look, count = drive[f"lm {width}"], len(TEXT)
    assert look["steps"] == STEPS
    assert look["runs"] == len(MIXERS)
    assert look["places"] == 0
    assert look["pieces"] == list(TEXT.replace(" ", "␣"))
    assert look["hidden"] == count * (count - 1) // 2
    assert look["chosen"] == str(count - 1), "the last token is the one that is asked what follows"
    assert (look["layers"], look["picked"]) == (2, "1")
    assert (look["after"], look["first"]) == ("after “o”", "after “T”")
    assert look["bars"] == 5 + 2 * (count - 1)


@pytest.mark.parametrize("width", ["1366", "390"])
def test_each_family_is_told_apart(drive, width):
    told = drive[f"lm {width}"]["families"]
    words = [
        "Click on a cell",
        "exp(k + w)",
        "into one vector of 16 numbers",
        "memory of 4 slots",
        "one memory of 64 numbers",
        "random × 0.50",
        "its own 5 taps",
        "fade",
    ]
    assert all(word in told[str(run)] for run, word in enumerate(words))


@pytest.mark.parametrize("width", ["1366", "390"])
def test_an_encoder_hides_nothing_from_its_words(drive, width):
    look = drive[f"encoder {width}"]
    assert look["steps"] == STEPS
    assert look["hidden"] == 0
    assert look["after"] == "in place of “o”", "the first that is ever hidden"
    assert look["first"] == "in place of “T”"
    assert (look["never"], look["unasked"]) == (False, True)
    assert look["bars"] == 5 + 2 * (len(TEXT) - 1)
