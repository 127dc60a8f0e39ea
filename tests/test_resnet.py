"""Test the convolutional baseline: its counts against closed forms, its place in the CIFAR recipe, and training it."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from tokenmix import MixerError
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report.runs import load_model, read_run
from tokenmix.lab.report.tables import summary_table
from tokenmix.lab.train import resume, train
from tokenmix.models import ResNet, ResNetConfig, build_model, config_from_json, macs


def closed_form(c: ResNetConfig) -> tuple[int, int]:
    """Parameters and multiply-accumulates: 9 a b of each convolution, 2 of each channel of a norm."""
    cells = c.image_size[0] * c.image_size[1]
    weights = 9 * c.channels * c.widths[0]
    total, norms, before = weights * cells, 2 * c.widths[0], c.widths[0]
    for i, (width, depth) in enumerate(zip(c.widths, c.depths, strict=True)):
        here = 9 * before * width + 9 * (2 * depth - 1) * width**2
        norms += 4 * depth * width
        if i or before != width:
            here, norms = here + before * width, norms + 2 * width
        weights, total, before = weights + here, total + here * cells // 4**i, width
    head = before * c.classes
    return weights + norms + head + c.classes, total + head


ROW = RECIPES["aft_cifar10_classify"].rows["resnet"].model


@pytest.mark.parametrize("config", [ResNetConfig(), ResNetConfig(widths=(8, 8), depths=(1, 2), classes=3), ROW])
def test_counts_are_the_closed_form(config):
    with torch.device("meta"):
        model = build_model(config)
    assert (sum(p.numel() for p in model.parameters()), macs(model).total) == closed_form(config)
    assert macs(model).mixing == 0


def test_the_row_costs_what_the_other_rows_cost():
    rows = RECIPES["aft_cifar10_classify"].rows
    with torch.device("meta"):
        costs = {name: macs(build_model(rows[name].model)).total for name in ("resnet", "aft_conv_k7")}
    assert costs["resnet"] == pytest.approx(costs["aft_conv_k7"], rel=0.01)


def test_a_block_is_the_paper_s():
    """In training, norms use the batch: relu(norm(conv(relu(norm(conv x)))) + norm(shortcut x))."""
    block = build_model(ResNetConfig(widths=(4, 6), depths=(1, 1))).stages[1][0]
    x = torch.randn(3, 4, 8, 8)

    def normed(y, norm):
        return F.batch_norm(y, None, None, norm.weight, norm.bias, training=True)

    y = F.relu(normed(F.conv2d(x, block.conv1.weight, stride=2, padding=1), block.norm1))
    y = normed(F.conv2d(y, block.conv2.weight, padding=1), block.norm2)
    want = F.relu(y + normed(F.conv2d(x, block.shortcut.weight, stride=2), block.shortcut_norm))
    torch.testing.assert_close(block(x), want)


def test_any_size_of_image_and_no_head():
    model = build_model("resnet_cifar20", classes=0).eval()
    assert model(torch.randn(2, 3, 17, 30)).shape == (2, 64)


def test_initial_weights_come_from_the_seed_alone():
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(ResNet(ResNetConfig(widths=(4,), depths=(2,))).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_config_is_json_and_refuses_what_it_cannot_build():
    config = ResNetConfig(widths=(4, 8), depths=(1, 2), image_size=9)
    assert config_from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(MixerError, match=r"ResNetConfig: widths and depths .* got \[4\] and \[1, 2\]"):
        ResNetConfig(widths=(4,), depths=(1, 2))
    with pytest.raises(MixerError, match="ResNetConfig: channels must be positive.* got 3, 10 and 1.0"):
        ResNetConfig(drop_path=1.0)
    with pytest.raises(MixerError, match=r"ResNet: expects images \(batch, 3"):
        build_model("resnet_cifar20")(torch.zeros(1, 1, 8, 8))


def test_the_row_trains_and_stands_in_the_table(tmp_path):
    recipe = RECIPES["aft_cifar10_classify"]
    steps = {"train.steps": 60, "optim.warmup": 10, "train.eval_every": 60, "train.save_every": 60}
    config = recipe.config("resnet", "smoke").override(steps)
    train(config, tmp_path / "run")
    table = summary_table([read_run(tmp_path / "run")])
    accuracy = table.rows[0][table.columns.index("valid top-1")]
    assert float(accuracy.split()[0]) > 50


def test_the_statistics_of_its_norms_are_resumed(tmp_path):
    config = RECIPES["aft_cifar10_classify"].config("resnet", "smoke")
    often = {"train.eval_every": 4, "train.save_every": 4, "optim.warmup": 2, "optim.schedule": "constant"}
    for name, steps in (("whole", 8), ("parts", 4)):
        train(config.override({**often, "train.steps": steps}), tmp_path / name)
    resume(tmp_path / "parts", changes={"train.steps": 8})
    whole, parts = (load_model(read_run(tmp_path / name)).state_dict() for name in ("whole", "parts"))
    assert whole["stem_norm.running_mean"].abs().max() > 0
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
