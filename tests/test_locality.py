"""Measures of locality and of detection by keys, on numbers whose answers are known; what pages say of the record."""

from __future__ import annotations

import json

import pytest
import torch

import locality
from tokenmix.models import LMConfig, ViTConfig, build_model


def test_detection_is_the_share_of_pairs_in_which_the_found_patch_has_the_larger_key():
    keys = torch.tensor([[[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]], [[1.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 9.0]]])
    found = torch.tensor([[True, False, True, False], [True, True, True, True]])  # the second image does not count
    assert locality.detection(keys, found).tolist() == [0.75, 0.25]


def test_equal_weights_are_global_and_a_token_that_reads_itself_is_local():
    distances = torch.tensor([0.0, 1.0, 2.0])
    equal = locality.relative(torch.ones(3), torch.ones(3), distances, 1)
    assert equal == pytest.approx({"distance": 1.0, "near": 2 / 3, "near_equal": 2 / 3})
    itself = locality.relative(torch.tensor([1.0, 0.0, 0.0]), torch.ones(3), distances, 1)
    assert itself == pytest.approx({"distance": 0.0, "near": 1.0, "near_equal": 2 / 3})


def test_a_model_without_preference_is_global():
    spec = {"name": "attention", "heads": 2}
    lm = build_model(LMConfig(dim=8, max_len=12, mixers=(spec,), layers=1))
    vit = build_model(ViTConfig(dim=8, layers=1, mixers=(spec,), image_size=(8, 8), patch=2, classes=2, pool="mean"))
    bias = build_model(
        ViTConfig(dim=8, layers=1, mixers=({"name": "aft_full"},), image_size=(8, 8), patch=2, classes=2, pool="mean")
    )
    with torch.no_grad():
        for model in (lm, vit):
            model.blocks[0].mixer.q_proj.weight.zero_()
            model.blocks[0].mixer.q_proj.bias.zero_()
        bias.blocks[0].mixer.bias.u.zero_()
    images = torch.randn(3, 3, 8, 8)
    (of_lm,) = locality.measure_lm(lm, torch.randint(256, (4, 12)))
    (of_vit,) = locality.measure_vit(vit, images, "vit")
    (of_bias,) = locality.measure_vit(bias, images, "vit_bias")
    for found in (of_lm, of_vit, of_bias):
        assert found["distance"] == pytest.approx(1.0)
        assert found["near"] == pytest.approx(found["near_equal"])


def test_what_the_annotated_page_says_below_its_tables_is_in_the_record():
    means = json.loads(locality.RECORD.read_text())["mean"]
    assert all(abs(layer["distance"] - 1) < 0.02 for layer in means["vit"].values()), "still global"
    text = [layer["distance"] for layer in means["lm"].values()]
    assert max(text) < 0.5, "local"
    assert text == sorted(text, reverse=True), "the higher the more local"
    keys = [layer["any"] for layer in means["keys"].values()]
    runs = json.loads(locality.RECORD.read_text())["runs"]
    chance = [keys[0], *(layer["any"] for seed in runs["keys"].values() for layer in seed["start"])]
    assert all(abs(value - 0.5) < 0.05 for value in chance)
    assert keys[2] == max(keys) > 0.7
    assert all(seed["trained"][3]["any"] < seed["trained"][2]["any"] for seed in runs["keys"].values())
    assert all(len(seeds) == 3 for seeds in runs.values())
