"""Rows of recipes and of plans: each is a model of its own, and is what its name says."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.recipes import RECIPES, SIZES, amounts, experiment
from tokenmix.lab.sweep import SweepPlan, sweep
from tokenmix.lab.sweep.plan import Jobs, check_plan, run_key
from tokenmix.system.text import named_apart

ROOT = Path(__file__).parents[1]
PLANS = sorted((ROOT / "benchmarks" / "sweeps").glob("*.json"))


def running(recipe, size):
    """Return the configs of the rows that run at a size, by name."""
    found = {}
    for row in recipe.rows:
        with contextlib.suppress(MixerError):  # "does not run at size"
            found[row] = recipe.config(row, size)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RECIPES)
def test_rows_that_run_are_models_of_their_own(name, size):
    recipe, first = RECIPES[name], {}
    for row, config in running(recipe, size).items():
        other = first.setdefault(experiment(config), row)
        same = {recipe.repeats.get(each, each) for each in (row, other)}
        assert len(same) == 1, f"{row} and {other} are one model at {size}"
    assert recipe.default in running(recipe, size)


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].repeats])
def test_rows_declared_as_repeats_are_one_model(name):
    recipe = RECIPES[name]
    for row, earlier in recipe.repeats.items():
        if (name, row) == ("hydra_imagenet", "fig2/linear_768_heads"):  # one model by the identity of Hydra's paper
            continue
        assert experiment(recipe.config(row, "paper")) == experiment(recipe.config(earlier, "paper")), row


def test_hydra_is_linear_attention_of_one_feature_per_head():
    """Which is why two rows of its recipe are declared one model."""
    import torch

    import tokenmix

    x = torch.randn(2, 5, 12)
    hydra = tokenmix.build_mixer("hydra", 12)
    linear = tokenmix.build_mixer("multihead_linear", 12, heads=12)
    linear.load_state_dict(hydra.state_dict())
    assert torch.allclose(hydra(x), linear(x), atol=1e-6)


SAID = {
    "heads": re.compile(r"(?:_h|softmax_|linear_)(\d+)(?:_heads)?$"),
    "kernel_size": re.compile(r"(?:^|/|_)k(\d+)"),
    "window": re.compile(r"^table5/window_(\d+)"),
    "seq_len": re.compile(r"^table6/length_(\d+)"),
}
"""Amounts that names of rows state."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_is_what_its_name_says(name):
    said = 0
    for size in SIZES:
        for row, config in running(RECIPES[name], size).items():
            for amount, pattern in SAID.items():
                if (match := pattern.search(row)) and (number := int(match[1])):
                    assert amounts(config)[amount] == number, (row, size)
                    said += 1
    assert said or name not in ("hydra_imagenet", "ablations", "aft_imagenet", "aft_enwik8", "aft_cifar10_classify")


@pytest.mark.parametrize("last", range(13))
def test_hydra_replaces_as_many_layers_as_its_rows_say(last):
    specs = RECIPES["hydra_imagenet"].config(f"fig4/last_{last}").model.specs()
    assert [spec["name"] for spec in specs] == ["attention"] * (12 - last) + ["hydra"] * last


def test_a_row_that_a_size_would_change_is_refused_with_the_size_that_holds_it():
    with pytest.raises(MixerError, match=r"heads 768 -> 96.*smallest size at which it does is gpu \(--size gpu\)"):
        RECIPES["hydra_imagenet"].config("fig2/linear_768_heads")


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
def test_plans_of_the_project_compare_different_models(plan):
    plan = SweepPlan.from_json(json.loads(plan.read_text()))
    configs = {row: experiment(plan.without_data(row)) for row in plan.rows}
    assert len(set(configs.values())) == len(plan.rows)


def test_a_plan_of_equal_rows_is_refused():
    heads = {f"{n} heads": {"row": "attention", "model.mixers": [{"name": "attention", "heads": n}]} for n in (4, 8)}
    same = {"again": {"row": "attention", "model.mixers": [{"name": "attention", "heads": 4, "qkv_bias": True}]}}
    check_plan(Jobs(SweepPlan("text", heads, rates=(0.1,)), 1), 1)
    with pytest.raises(MixerError, match=r"rows '4 heads' and 'again' are one model .*no field of their configs"):
        check_plan(Jobs(SweepPlan("text", heads | same, rates=(0.1,)), 1), 1)
    widths = SweepPlan("text", {"attention": {}, "b": {"row": "attention"}}, rates=(0.1,))
    with pytest.raises(MixerError, match="'attention' and 'b' are one model"):
        check_plan(Jobs(widths, 1), 1)


def test_a_plan_of_rows_that_a_change_makes_equal_names_the_field():
    rows = {"table5/window_8": {}, "table5/window_32": {}}
    mixers = [{"name": "aft_local", "window": 4}]
    plan = SweepPlan("aft_enwik8", rows, rates=(0.1,), changes={"model.mixers": mixers})
    with pytest.raises(MixerError, match="window is 4 in both, for 8 and 32 at the paper's size"):
        check_plan(Jobs(plan, 1), 1)


@pytest.mark.parametrize("name", ["", ". .", "a\nb", "/" * 80, "a" * 300])
def test_a_row_that_can_be_no_folder_is_refused(name):
    with pytest.raises(MixerError, match="the name of a row becomes a folder") as why:
        SweepPlan("text", {name: {}}, rates=(0.1,))
    assert len(str(why.value)) < 200


def test_rows_whose_names_have_slashes_stay_apart_and_inside_of_the_folder():
    names = ["fig2/a", "fig2%2Fa", "../a", "fig2/../a"]
    keys = [run_key("final", name, 0.1, 0) for name in names]
    assert len(set(keys)) == len(names)
    assert all(key.count("/") == 2 and ".." not in key.split("/") for key in keys)
    assert named_apart([Path("x") / run_key("final", "fig2/a", 0.1, 0)]) == ["fig2/a/rate_0.1_seed_0"]


def test_a_sweep_of_rows_with_slashes_runs_and_goes_on(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 60)
    changes = {"data.source": str(text), "data.seq_len": 16, "model.max_len": 16, "train.eval_bytes": 200}
    mixers = {"table5/window_1": 1, "table5/window_2": 2}
    rows = {row: {"model.mixers": [{"name": "aft_local", "window": n}]} for row, n in mixers.items()}
    plan = SweepPlan("aft_enwik8", rows, rates=(1e-3,), seeds=(0,), steps=2, changes=changes)
    found = sweep(plan, tmp_path / "out")
    assert [len(found.scores(row)) for row in rows] == [1, 1]
    folder = tmp_path / "out" / "runs" / run_key("final", "table5/window_1", 1e-3, 0)
    assert (folder / "config.json").is_file()
    assert "table5/window_1" in (tmp_path / "out" / "table.md").read_text()
    assert sweep(None, tmp_path / "out").runs == found.runs
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "table5/window_1/rate_0.001_seed_0" in (tmp_path / "page.html").read_text()
