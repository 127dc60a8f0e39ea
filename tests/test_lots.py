"""Verdicts drawn by lot: what is recorded of them follows from the scores that stand beside it."""

import json
from statistics import mean, stdev

import pytest
from benchmarks import lots

from tokenmix.lab.sweep.evidence import student


@pytest.mark.parametrize(
    ("before", "now", "word"),
    [
        ("better", "better", "kept"),
        ("no difference", "no difference", "kept"),
        ("worse", "no difference", "not found again"),
        ("no difference", "better", "a difference now"),
        ("better", "worse", "turned"),
        ("worse", "cannot be tested", "cannot be tested"),
    ],
)
def test_a_verdict_keeps_its_word_only_if_it_is_found_again(before, now, word):
    assert lots.judge(before, now) == word


def test_lots_are_drawn_among_verdicts_of_short_runs():
    urn = lots.list_decided_trials()
    assert urn
    assert len({(t.sweep, t.row, t.against) for t in urn}) == len(urn)
    for trial in urn:
        results = lots.measured_sweep(trial.sweep)
        for row in (trial.row, trial.against):
            assert len(results.scores(row)) >= 3, (trial, row)


def test_recorded_lots_follow_from_their_runs():
    kept = json.loads(lots.RESULTS.read_text())
    assert len(kept["lots"]) == min(lots.LOTS, kept["urn"])
    for lot in kept["lots"]:
        trial, now = lot["trial"], lot["now"]
        score = "beyond" if "beyond" in kept["runs"][f"{trial['sweep']}: {trial['row']}"][0] else "score"
        a, b = (
            {run["seed"]: run[score] for run in kept["runs"][f"{trial['sweep']}: {row}"]}
            for row in (trial["row"], trial["against"])
        )
        assert set(a) == set(b) == set(kept["seeds"])
        assert not set(a) & {0, 1, 2}
        differences = [a[seed] - b[seed] for seed in a]
        assert now["difference"] == pytest.approx(mean(differences), abs=1e-9)
        margin = student(len(a)) * stdev(differences) / len(a) ** 0.5
        assert now["margin"] == pytest.approx(margin, abs=1e-9)
        assert lot["word"] == lots.judge(lot["before"]["verdict"], now["verdict"])
