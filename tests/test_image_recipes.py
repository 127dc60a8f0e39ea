"""The recipes on images: the papers' rows and hyper-parameters, and every row running small."""

from __future__ import annotations

import pytest
import torch

from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.recipes.images import IMAGENET_IMAGES, shrink
from tokenmix.lab.train import train
from tokenmix.models import build_model

IMAGES = {name: recipe for name, recipe in RECIPES.items() if recipe.config().data.kind == "images"}
NOT_SMALL = {"aft_cifar10_classify": {"aft_conv_k11"}, "hydra_imagenet": set(), "aft_imagenet": set()}
NOT_SMALL["hydra_imagenet"] = {f"fig2/linear_{heads}_heads" for heads in (192, 384, 768)}
NOT_SMALL["aft_imagenet"] = {row for row in IMAGES["aft_imagenet"].rows if row.startswith("table8/")}
NOT_SMALL["aft_imagenet"] |= {f"table7/aft_conv_{row}" for row in ("tiny_k11_h192", "small_k11_h384", "small_k15_h384")}
"""Rows that smoke cannot hold; ``test_rows.py`` says why."""
ROWS = [(name, row) for name, recipe in IMAGES.items() for row in recipe.rows if row not in NOT_SMALL.get(name, ())]


def count(config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(config.model).parameters())


def test_the_issue_s_recipes_are_there():
    assert set(IMAGES) >= {"aft_cifar10_density", "aft_imagenet", "aft_cifar10_classify", "hydra_imagenet", "ablations"}


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_every_row_runs_small_and_keeps_its_mixers(name, row):
    small, paper = RECIPES[name].config(row, "smoke").model, RECIPES[name].config(row, "paper").model
    model = build_model(small).eval()
    if small.kind == "mae":
        keep = torch.tensor([[0, 3, 9], [2, 3, 4]])
        assert model(torch.randn(2, small.channels, *small.image_size), keep).shape == (2, 13, small.values)
    elif small.kind == "dit":
        assert model(torch.randn(2, 1, 8, 8), torch.rand(2)).shape == (2, 1, 8, 8)
    elif small.kind == "image_density":
        assert model(torch.zeros(1, small.max_len, dtype=torch.long)).shape == (1, small.max_len, 256)
    else:
        assert model(torch.randn(2, small.channels, *small.image_size)).shape == (2, 10)
    if hasattr(paper, "specs"):
        assert {s["name"] for s in small.specs()} <= {s["name"] for s in paper.specs()}
        assert small.specs()[-1]["name"] == paper.specs()[-1]["name"]


def test_deit_s_training_as_printed():
    config = RECIPES["aft_imagenet"].config("table7/aft_conv_tiny_k11_h32", "paper")
    optim, data, loop = config.optim, config.data, config.train
    assert (loop.batch_size, loop.steps) == (1024, 300 * (IMAGENET_IMAGES // 1024))
    assert (optim.lr, optim.weight_decay, optim.eps, optim.clip, optim.betas) == (1e-3, 0.05, 1e-8, 0.0, (0.9, 0.999))
    assert optim.warmup == 5 * (IMAGENET_IMAGES // 1024)
    assert optim.lr * optim.min_lr_ratio == pytest.approx(1e-5)
    augment = data.augment
    assert (augment.mixup, augment.cutmix, augment.erasing, augment.repeats, augment.randaugment) == (
        0.8,
        1.0,
        0.25,
        3,
        "rand-m9-mstd0.5-inc1",
    )
    assert (data.smoothing, config.model.drop_path) == (0.1, 0.1)
    tuned = RECIPES["aft_imagenet"].config("table8/aft_conv_finetuned", "paper")
    assert (tuned.train.batch_size, tuned.train.steps, tuned.model.image_size) == (
        64,
        100 * (IMAGENET_IMAGES // 64),
        (384, 384),
    )


@pytest.mark.parametrize(
    ("row", "millions"),
    [
        ("table2/aft_local_256_24x256", 29.31),
        ("table2/aft_local_256_12x512", 44.38),
        ("table2/aft_simple_24x256", 19.87),
        ("table3/plain", 246.36),
        ("table2/transformer_24x256", 19.87),
    ],
)
def test_density_at_the_paper_s_size(row, millions):
    config = RECIPES["aft_cifar10_density"].config(row, "paper")
    assert round(count(config) / 1e6, 2) == millions
    assert config.model.max_len == 3072
    assert (config.data.augment.flip, config.data.augment.shift, config.model.dropout) == (0.5, 10, 0.1)
    assert (config.optim.lr, config.optim.weight_decay, config.optim.schedule, config.train.batch_size) == (
        3e-3,
        0.1,
        "vaswani",
        128,
    )
    assert config.train.steps == 200 * 50_000 // 128


def test_printed_numbers_are_those_of_the_tables():
    imagenet, density = RECIPES["aft_imagenet"].rows, RECIPES["aft_cifar10_density"].rows
    assert imagenet["table7/aft_conv_small_k15_h384"].printed == {
        "top1": 81.0,
        "parameters_m": 23.0,
        "images_per_s": 936,
        "gb": 3.2,
    }
    assert imagenet["table8/aft_conv_finetuned"].printed["top1"] == 83.4
    assert density["table2/aft_local_256_24x256"].printed["test"] == density["table3/factors"].printed["test"] == 2.74
    assert len([r for r in imagenet if r.startswith("table7/")]) == 11
    for name in ("aft_full_tiny", "aft_conv_tiny_k11_h192", "aft_conv_small_k11_h16"):
        config = RECIPES["aft_imagenet"].config(f"table7/{name}", "paper")
        assert abs(count(config) / 1e6 - imagenet[f"table7/{name}"].printed["parameters_m"]) < 0.08


def test_a_pattern_over_layers_is_kept_from_the_back():
    specs = shrink(RECIPES["hydra_imagenet"].rows["fig4/every_6"].model, layers=4).specs()
    assert specs[-1]["name"] == "hydra"
    specs = shrink(RECIPES["hydra_imagenet"].rows["fig4/last_6"].model, layers=4).specs()
    assert [spec["name"][0] for spec in specs] == ["a", "a", "h", "h"]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("aft_cifar10_classify", "aft_conv_k7"),
        ("aft_cifar10_classify", "hydra"),
        ("aft_cifar10_density", "table2/aft_simple_24x256"),
        ("aft_cifar10_density", "table2/image_transformer_12x512"),
        ("ablations", "global/k7_window_only"),
        ("hydra_imagenet", "fig2/linear_96_heads"),
    ],
)
def test_rows_train(name, row, tmp_path):
    fields = {"train.steps": 2, "train.batch_size": 4, "train.eval_images": 20, "train.samples": 1, "train.threads": 1}
    assert train(RECIPES[name].config(row, "smoke").override(fields), tmp_path / "run")["step"] == 2
