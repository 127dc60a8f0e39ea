"""What the demo trains: the models that its sweep tunes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tokenmix.lab.demo.plan import MODELS, RATES, Plan
from tokenmix.lab.sweep.plan import SweepPlan
from tokenmix.lab.sweep.results import Results

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SWEEP = "aft_parts.json"
ROWS = {name: "aft_forget, norm" if name == "aft_forget" else name for name in MODELS}
"""The row of the sweep for each model of the demo."""


def test_the_sweep_that_tuned_the_rates_trains_the_models_of_the_demo():
    sweep = SweepPlan.from_json(json.loads((BENCHMARKS / "sweeps" / SWEEP).read_text()))
    results = Results.open(BENCHMARKS / "results" / SWEEP, sweep)
    assert {name: results.leading_rates(row)[0] for name, row in ROWS.items()} == RATES  # of short runs
    for name, row in ROWS.items():
        tuned, shown = sweep.config(row), Plan().run(name, sweep.steps)
        assert tuned.model == shown.model
        assert tuned.data == shown.data
        assert asdict(tuned.optim) | {"lr": None, "muon_lr": None} == asdict(shown.optim) | {
            "lr": None,
            "muon_lr": None,
        }
        assert tuned.optim.muon_lr / tuned.optim.lr == pytest.approx(shown.optim.muon_lr / shown.optim.lr)
        assert tuned.train.batch_size == shown.train.batch_size
        assert tuned.train.eval_bytes == shown.train.eval_bytes
