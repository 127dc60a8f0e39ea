"""A budget of time: the layers chosen, their times by a clock that only they move, the plan, wrong commands."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

from surgery_models import make
from test_advise import BERT, passing, refused, saved_with_tokenizer  # noqa: F401  (passing is a fixture)
from tokenmix import MixerError
from tokenmix.hosts.surgery import replace_mixers
from tokenmix.hosts.surgery.adapters import adapters_of
from tokenmix.lab import cli
from tokenmix.lab.advise import budget as budgets
from tokenmix.lab.advise.budget import time_layers
from tokenmix.lab.advise.layer_plan import Layer, LayerPlan, choose_greedily, choose_layers, parse_budget

FIRST, SECOND = "encoder.layer.0.attention", "encoder.layer.1.attention"


def least(costs, savings, target):
    """The least sum of costs over all subsets that save enough."""
    picks = itertools.product((False, True), repeat=len(costs))
    sums = [(sum(itertools.compress(costs, p)), sum(itertools.compress(savings, p))) for p in picks]
    return min((cost for cost, saved in sums if saved >= target), default=None)


@pytest.mark.parametrize("target", [0.5, 1.0, 2.5, 4.0, 6.5, 13.0])
@pytest.mark.parametrize("savings", [(1.0,) * 6, (1.0, 2.0, -1.0, 3.0, 0.5, 2.5)])
def test_the_best_subset_is_chosen(savings, target):
    costs = (0.6, 0.1, 0.0, 0.2, 0.05, 0.4)
    chosen = choose_layers(costs, savings, target)
    assert (None if chosen is None else sum(costs[i] for i in chosen)) == pytest.approx(least(costs, savings, target))


def test_the_greedy_choice_is_the_best_where_savings_are_equal_and_may_miss_it_elsewhere():
    costs = (0.6, 0.1, 0.3, 0.2, 0.05, 0.4)
    for count in range(7):
        assert choose_greedily(costs, (1.0,) * 6, count) == choose_layers(costs, (1.0,) * 6, count)
    assert choose_greedily((1.0, 6.0), (6.0, 10.0), 10.0) == (1,)  # the cheap layer alone is not enough, nor needed
    # the first layer costs least per saving, but the other two together cost less than it and one of them
    costs, savings = (5.0, 4.5, 4.5), (6.0, 5.0, 5.0)
    assert (choose_greedily(costs, savings, 10.0), choose_layers(costs, savings, 10.0)) == ((0, 1), (1, 2))


def test_many_layers_are_chosen_greedily():
    costs = [float((7 * i) % 40) for i in range(40)]
    assert choose_layers(costs, [1.0] * 40, 3) == tuple(sorted(sorted(range(40), key=lambda i: costs[i])[:3]))
    assert choose_layers(costs, [1.0] * 40, 41) is None


def test_a_layer_whose_cost_is_no_number_is_the_last_to_be_replaced():
    assert choose_layers((float("inf"), 3.0), (2.0, 2.0), 2.0) == (1,)
    assert choose_layers((float("inf"), 3.0), (2.0, 2.0), 4.0) == (0, 1)


def test_the_seconds_of_a_layer_are_those_of_all_its_parts(passing):  # noqa: F811
    model = make("bert")
    replaced = replace_mixers(model, "hydra", seed=0)[0]

    def slow(module: nn.Module, seconds: float) -> None:
        module.register_forward_hook(lambda *_: passing(seconds), prepend=True)

    for i, layer in enumerate(model.encoder.layer):
        slow(layer.attention.self, 3.0 + i)
        slow(layer.attention.output.dense, 0.5)
        slow(layer.intermediate, 10.0)
        slow(replaced.encoder.layer[i].attention.self, 1.0)
    x = torch.ones(1, 4, dtype=torch.long)
    for speedup, total in ((0.9, 6.0), (28 / 22, 6.0), (2.0, 14.0)):  # what the whole model saves, or the layers
        whole, saved = time_layers(model, replaced, lambda m: m(x), speedup, 0.0, "cpu")
        assert whole == pytest.approx(28.0)
        assert saved == {FIRST: pytest.approx(total * 2.5 / 6), SECOND: pytest.approx(total * 3.5 / 6)}


@pytest.fixture
def fixed_times(monkeypatch):
    """Let a pass take 10 s, of which replacing saves 1 s in the first layer and 4 s in the second."""
    monkeypatch.setattr(budgets, "time_layers", lambda *_: (10.0, {FIRST: 1.0, SECOND: 4.0}))
    monkeypatch.setattr(budgets, "measure_speed", lambda *_: (1.55, 1.6, 1.7))


def ask(capsys, model, mixer, budget, *more) -> tuple[int, dict]:
    code = cli.main(
        ["advise", model, "--lengths", "8", "--seconds", "0.2", "--probe", "0", "--candidates", mixer, "--json"]
        + ["--budget", budget, *more]
    )
    return code, json.loads(capsys.readouterr().out)["plan"]


@pytest.mark.usefixtures("fixed_times")
def test_the_plan_is_what_replace_mixers_takes(tmp_path, capsys):
    make("bert").save_pretrained(tmp_path)
    code, plan = ask(capsys, str(tmp_path), "hydra", "1.5x")
    assert (code, plan["mixers"], plan["reachable"]) == (0, {SECOND: {"name": "hydra"}}, True)
    assert plan["predicted"] == pytest.approx(10 / 6)
    assert "1.67x as fast predicted, 1.60x (1.55 to 1.70) measured; together" in plan["text"][0]
    assert plan["text"][1] == f"Plan: replace_mixers(model, {plan['mixers']}, seed=0)"
    assert list(adapters_of(replace_mixers(make("bert"), plan["mixers"])[0])) == [f"{SECOND}.self"]
    costs = [layer["cost"] for layer in plan["layers"]]
    assert min(costs) > 0
    assert plan["cost"] == pytest.approx(costs[1])  # it alone was replaced
    code, plan = ask(capsys, str(tmp_path), "attention", "1.1")
    assert max(layer["cost"] for layer in plan["layers"]) < 1e-9  # the projections were copied


@pytest.mark.usefixtures("fixed_times")
def test_a_budget_out_of_reach_says_what_is_reachable(tmp_path, capsys, monkeypatch):
    make("bert").save_pretrained(tmp_path)
    code, plan = ask(capsys, str(tmp_path), "hydra", "2.5x")
    assert (code, plan["reachable"], len(plan["text"])) == (1, False, 1)
    assert plan["text"][0].startswith(
        "Budget: 2.5x cannot be reached with hydra, at 8 tokens, batch 1: with the 2 of 2"
    )
    assert plan["text"][0].endswith(
        "2.00x as fast predicted, 1.60x (1.55 to 1.70) measured; this is what is reachable."
    )
    monkeypatch.setattr(budgets, "measure_speed", lambda *_: (2.6, 2.7, 2.8))  # faster than predicted
    assert ask(capsys, str(tmp_path), "hydra", "2.5x")[0] == 0
    monkeypatch.setattr(budgets, "time_layers", lambda *_: (10.0, {FIRST: -1.0, SECOND: 0.0}))
    code, plan = ask(capsys, str(tmp_path), "hydra", "1.1x")
    assert (code, plan["ratio"], "not faster than attention in any layer" in plan["text"][0]) == (1, None, True)


def test_what_was_measured_is_held_against_the_budget():
    layers = (Layer("a", 4.0, 0.1), Layer("b", 1.0, float("inf")))

    def plan_text(low, middle, high):
        ratio = (low, middle, high)
        return LayerPlan(1.5, {"name": "x"}, "at 8", 10.0, layers, True, layers[:1], True, ratio, 0.1).sentences()[0]

    assert "measured below the budget" in plan_text(1.2, 1.3, 1.4)
    assert "lies within the spread" in plan_text(1.4, 1.5, 1.6)
    assert "budget lies" not in plan_text(1.5, 1.6, 1.7)
    table = LayerPlan(3, {"name": "x"}, "at 8", 10.0, layers, True, layers, False, None, 0.1).table()
    assert table.rows[1] == ["b", "1000.00", "not finite", "yes"]


@pytest.mark.usefixtures("fixed_times")
def test_only_the_chosen_layers_are_distilled(tmp_path, capsys):
    from tokenmix.hosts.surgery.save_load import load_converted

    data, out = tmp_path / "text.txt", tmp_path / "out"
    data.write_text("the cat sat on the mat\nthe mat sat on the cat\n" * 60)
    more = ["--data", str(data), "--minutes", "0.01", "--write", str(out)]
    model = saved_with_tokenizer(tmp_path / "bert")
    assert ask(capsys, model, "hydra", "3x", *more)[0] == 1
    assert not out.exists()
    code, plan = ask(capsys, model, "hydra", "1.5x", *more)
    assert (code, plan["data"], list(adapters_of(load_converted(out)))) == (0, True, [f"{SECOND}.self"])


def test_wrong_budgets(capsys):
    assert (parse_budget("1.5x"), parse_budget("2")) == (1.5, 2.0)
    for given in ("", "x", "fast", "1x", "0.9x", "-2x", "inf", "nan", "1.5xx", "1,5x", "9" * 400):
        with pytest.raises(MixerError, match="--budget takes how many times as fast the model must be, above 1"):
            parse_budget(given)
    for argv, why in {
        ("bert", "--budget", "half"): "above 1, such as 1.5x, got 'half'",
        ("bert", *BERT, "--budget", "2x", "--worth", "3"): "leave out --worth",
        ("bert", *BERT, "--budget", "2x", "--last", "1"): "are for distilling",
        ("bert", *BERT, "--budget", "2x", "--runtime", "compile"): "leave out --runtime",
        ("bert", *BERT, "--budget", "2x", "--candidates", "none"): "leave out --candidates none",
        ("aft_full_tiny", "--budget", "2x"): "is one of ours",
    }.items():
        assert why in refused(capsys, "advise", *argv), argv
