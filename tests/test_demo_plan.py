"""What the demo trains: steps from timed steps, and the models that its sweep tunes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tokenmix.lab.demo.lanes import Lanes
from tokenmix.lab.demo.plan import MODELS, RATES, Plan, Schedule
from tokenmix.lab.demo.training import LONGER, schedules, training_seconds
from tokenmix.lab.sweep.plan import SweepPlan
from tokenmix.lab.sweep.results import Results

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SWEEP = "aft_parts.json"
ROWS = {name: "aft_forget, norm" if name == "aft_forget" else name for name in MODELS}
"""The row of the sweep for each model of the demo."""


def test_steps_fit_into_the_time():
    took = {"slow": 0.21, "even": 0.2, "fast": 0.1}
    for name, schedule in schedules(Plan(evals=5), took, 100.0).items():
        assert 99.0 < schedule.steps * took[name] * LONGER <= 100.0
        assert -(-schedule.steps // schedule.interval) == 5
    assert schedules(Plan(evals=5), took, 0.0)["fast"].steps == 5  # each is scored at least so often


def test_more_lanes_leave_more_time_for_each_model():
    took = dict.fromkeys(MODELS, 0.1)
    one, two = (training_seconds(Plan(), took, Lanes(n, 1), 240.0) for n in (1, 2))
    assert 0 < one < 240 / 4
    assert two - one == pytest.approx(240 / 2 - 240 / 4)  # two rounds of two


def test_the_sweep_that_tuned_the_rates_trains_the_models_of_the_demo():
    sweep = SweepPlan.from_json(json.loads((BENCHMARKS / "sweeps" / SWEEP).read_text()))
    results = Results.open(BENCHMARKS / "results" / SWEEP, sweep)
    assert {name: results.leading_rates(row)[0] for name, row in ROWS.items()} == RATES  # of short runs
    for name, row in ROWS.items():
        tuned, shown = sweep.config(row), Plan().run(name, Schedule(sweep.steps, 1))
        assert tuned.model == shown.model
        assert tuned.data == shown.data
        assert asdict(tuned.optim) | {"lr": None, "muon_lr": None} == asdict(shown.optim) | {
            "lr": None,
            "muon_lr": None,
        }
        assert tuned.optim.muon_lr / tuned.optim.lr == pytest.approx(shown.optim.muon_lr / shown.optim.lr)
        assert tuned.train.batch_size == shown.train.batch_size
        assert tuned.train.eval_bytes == shown.train.eval_bytes
