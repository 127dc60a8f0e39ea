"""Recipes: the paper's rows, as printed, and every size buildable."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab.recipes import RECIPES, SIZES, find_recipe
from tokenmix.lab.recipes.tuned import TUNED, Tuned
from tokenmix.lab.sweep.plan import SweepPlan
from tokenmix.lab.sweep.results import Results
from tokenmix.lab.train import RunConfig, train
from tokenmix.mixers import CORE
from tokenmix.models import build_model

ROOT = Path(__file__).parents[1]

ENWIK8 = RECIPES["aft_enwik8"]
ROWS = [(name, row) for name, recipe in RECIPES.items() for row in recipe.rows]


def count(config: RunConfig) -> int:
    """Count parameters, whose values are not drawn: torch takes most of the time for that, even on meta."""
    drawn = {name: lambda tensor, *_, **__: tensor for name in ("normal_", "uniform_")}
    with mock.patch.multiple(torch.Tensor, **drawn), torch.device("meta"):
        return sum(p.numel() for p in build_model(config.model).parameters())


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_every_row_builds_at_every_size_and_goes_to_json(name, row):
    sizes = []
    for size in SIZES:
        with contextlib.suppress(MixerError):  # of a size that does not hold what the row's name says
            config = RECIPES[name].config(row, size)
            assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
            assert (config.recipe, config.row, config.size) == (name, row, size)
            sizes.append(count(config))
    assert sizes == sorted(sizes)
    assert len(sizes) < 3 or sizes[0] < sizes[1]


def test_the_tables_are_all_there():
    rows = ENWIK8.rows
    assert len([r for r in rows if r.startswith("table4/")]) == 9
    windows = [int(r.removeprefix("table5/window_")) for r in rows if r.startswith("table5/")]
    assert windows == [0, 1, 2, 4, 8, 32, 64, 128, 256, 512, 1024]
    assert [int(r.removeprefix("table6/length_")) for r in rows if r.startswith("table6/")] == [1024, 2048, 4096]
    assert (
        rows["table5/window_32"].printed["test"]
        == rows["table4/aft_local_32_24x256"].printed["test"]
        == rows["table6/length_1024"].printed["test"]
        == 1.154
    )
    assert rows["table5/window_0"].printed["test"] == rows["table4/aft_simple_24x256"].printed["test"] == 1.209


@pytest.mark.parametrize(
    ("row", "millions"),
    [
        ("table4/aft_local_32_24x256", 31.93),
        ("table4/aft_local_32_12x512", 44.91),
        ("table4/aft_simple_24x256", 19.35),
        ("table4/transformer_24x256", 19.35),
        ("table4/transformer_12x512", 38.62),
        ("table4/linear_transformer_12x512", 38.62),
        ("table4/performer_12x512", 38.62),
        ("table4/reformer_12x512", 35.46),  # a transformer with keys for queries: 12 (512^2 + 512) = 3.15M fewer
        (
            "table4/synthesizer_dense_12x512",
            41.85,
        ),  # logits for 1024 keys in place of keys: 12 (8 (64 + 1) 1024 - 512^2 - 512) = 3.24M more
    ],
)
def test_paper_sizes_have_the_parameters_of_the_paper_s_models(row, millions):
    assert round(count(ENWIK8.config(row, "paper")) / 1e6, 2) == millions


def test_the_paper_size_is_the_paper_s_recipe():
    config = ENWIK8.config(None, "paper")
    assert (config.model.layers, config.model.dim, config.data.seq_len, config.model.dropout) == (24, 256, 1024, 0.1)
    assert config.model.mixers == ({"name": "aft_local", "window": 32, "rank": 256},)
    assert (config.optim.lr, config.optim.weight_decay, config.optim.schedule, config.train.batch_size) == (
        3e-3,
        0.5,
        "vaswani",
        128,
    )
    assert config.train.steps * 128 * 1024 == pytest.approx(100 * 90e6, rel=0.001)
    assert ENWIK8.config("table6/length_4096", "paper").train.steps == pytest.approx(config.train.steps / 4, rel=0.001)


def test_text_has_a_row_for_every_mixer_of_the_core():
    assert {row.mixers[0]["name"] for row in RECIPES["text"].rows.values() if len(row.mixers) == 1} >= set(CORE)
    assert set(CORE) <= set(RECIPES["text"].rows)


def test_wrong_names_are_refused():
    with pytest.raises(MixerError, match="nearest: aft_enwik8"):
        find_recipe("aft_enwik")
    with pytest.raises(MixerError, match="nearest: table5/window_1"):
        ENWIK8.config("table5/window_13")
    with pytest.raises(MixerError, match="smoke, gpu, paper"):
        ENWIK8.config(None, "large")


@pytest.mark.parametrize("row", [row for row in ENWIK8.rows if row.startswith("table4/")])
def test_every_row_of_table_4_takes_a_smoke_step(row, tmp_path):
    """On another text: enwik8 itself is a download."""
    (tmp_path / "text.txt").write_bytes(b"the cat sat on the mat. " * 500)
    fields = {
        "data.source": str(tmp_path / "text.txt"),
        "train.steps": 1,
        "train.batch_size": 2,
        "train.sample_bytes": 4,
        "train.eval_bytes": 300,
    }
    summary = train(ENWIK8.config(row, "smoke").override(fields), tmp_path / "run")
    assert summary["step"] == 1
    assert summary["valid_bits_per_byte"] < 8.5


@pytest.mark.parametrize("row", RECIPES["text"].rows)
def test_every_row_of_text_trains(row, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"the cat sat on the mat. " * 500)
    fields = {
        "data.source": str(tmp_path / "text.txt"),
        "data.seq_len": 64,
        "model.max_len": 64,
        "train.steps": 4,
        "train.batch_size": 2,
    }
    config = RECIPES["text"].config(row, "smoke").override(fields | {"train.sample_bytes": 8})
    summary = train(config, tmp_path / "run")
    assert summary["step"] == 4
    assert summary["valid_bits_per_byte"] < 8


def test_tuned_rates_are_those_of_the_sweep_they_name():
    """The best rate on validation, and an optimiser that has the sweep's fields."""
    for (recipe, size, shell), tuned in TUNED.items():
        plan = SweepPlan.from_json(json.loads((ROOT / "benchmarks/sweeps" / Path(tuned.source).name).read_text()))
        results = Results.open(ROOT / tuned.source, plan)
        assert (plan.recipe, plan.size, plan.shell) == (recipe, size, shell)
        assert tuned.rates == {row: results.best_rate(row) for row in tuned.rates}
        shared = {name.removeprefix("optim."): v for name, v in plan.changes.items() if name.startswith("optim.")}
        assert {name: v for name, v in shared.items() if name != "warmup"} == {
            name: v for name, v in tuned.optim.items() if name != "warmup"
        }
        assert not set(tuned.rates) - set(find_recipe(recipe).rows)


def test_a_recipe_in_a_tuned_shell_has_its_optimiser():
    config, plain = find_recipe("text").config("attention", "smoke", "modern"), find_recipe("text").config("attention")
    assert config.optim.name == "muon"
    assert config.model.mlp == "swiglu"
    assert config.row == "attention"
    assert plain.optim.name == "adamw"
    assert plain.model.mlp == "gelu"
    tuned = Tuned({"lr": 0.004, "muon_lr": 0.02, "name": "muon"}, "", {"hydra": 0.008})
    assert tuned.changes("hydra") == {"optim.lr": 0.008, "optim.muon_lr": 0.04, "optim.name": "muon"}
    assert tuned.changes("linear")["optim.lr"] == 0.004
