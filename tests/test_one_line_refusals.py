"""What cannot be done is said in one line: a missing package, a factory that fails, data that changed."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from image_sets import noise, save
from tokenmix import MixerError
from tokenmix.hosts.huggingface.require import check_transformers
from tokenmix.lab.advise.loading import load_host
from tokenmix.lab.anatomy.loading import open_subject
from tokenmix.lab.data.point_files import read_points
from tokenmix.lab.report import draw_pictures
from tokenmix.lab.train.task import check_unchanged
from tokenmix.models import ViT, ViTConfig


def refused(work) -> str:
    with pytest.raises(MixerError) as told:
        work()
    assert "\n" not in str(told.value)
    return str(told.value)


def test_changed_data_tells_what_changed():
    then = {"name": "pets", "images": [20, 2, 2], "classes": 2, "sha256": "ab" * 32}
    check_unchanged("images", then, {**then, "name": "moved"})
    check_unchanged("images", None, then)
    said = refused(lambda: check_unchanged("images", then, {**then, "images": [19, 2, 2], "sha256": "cd" * 32}))
    assert said == (
        "the images pets changed since this run began: images was [20, 2, 2], now [19, 2, 2]; sha256 was "
        "abababababababab..., now cdcdcdcdcdcdcdcd...; restore the old ones, or start a new run."
    )
    assert "labels was None, now 3" in refused(lambda: check_unchanged("clouds", then, {**then, "labels": 3}))


def test_missing_packages_are_named_with_their_extra(tmp_path, monkeypatch):
    model = ViT(ViTConfig(8, 1, ({"name": "attention", "heads": 2},), image_size=(8, 8), patch=4, classes=2))
    image = save(tmp_path / "a.png", noise(8, 8, 3))
    np.savetxt(tmp_path / "a.xyz", np.eye(3))
    for name in ("matplotlib", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "draw_pictures needs the extra 'plot'" in refused(lambda: draw_pictures(model, [image], tmp_path / "out"))
    assert refused(check_transformers).endswith("which is not installed: pip install 'tokenmix[hf]'.")
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert refused(lambda: read_points(tmp_path / "a.xyz")).endswith("pip install 'tokenmix[points]'.")


FACTORIES = """
def fails():
    raise RuntimeError("two\\nlines")
def divides():
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "fails",
            "calling it with nothing fails: RuntimeError: two lines (FOLDER/factories.py:3, in fails: raise Runtime",
        ),
        (
            "divides",
            "calling it with nothing fails: ZeroDivisionError: division by zero (FOLDER/factories.py:5, in divides",
        ),
    ],
)
def test_a_factory_that_fails(tmp_path, monkeypatch, name, words):
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert words in refused(lambda: load_host(f"factories:{name}")).replace(str(tmp_path), "FOLDER")


def test_a_module_that_fails_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text("x = {}\nx['a\\nb']\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = refused(lambda: load_host("halfway:make")).replace(str(tmp_path), "FOLDER")
    assert "cannot import 'halfway' ('a\\nb') (FOLDER/halfway.py:2" in said


def test_folders_that_were_exported_from_tokenmix(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "tokenmix_vit", "architectures": ["X"]}))
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "was exported from tokenmix; give the run or the model" in refused(lambda: load_host(str(tmp_path)))
    assert "was exported from tokenmix; give the run" in refused(lambda: open_subject(str(tmp_path)))
