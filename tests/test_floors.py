"""Floors: every metric of every task has the score of a predictor that reads nothing, and verdicts need to be above."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.sweep import Results, SweepPlan, compare, shortcomings
from tokenmix.lab.sweep.run import FLOOR, yardsticks
from tokenmix.lab.train.constant import BATCHES
from tokenmix.lab.train.tasks import open_task

ON = {
    "text": ("aft_simple", {"train.eval_bytes": 2000}),
    "aft_cifar10_density": ("table2/aft_simple_24x256", {"train.eval_images": 20}),
    "image_diffusion": ("aft_simple", {"train.eval_images": 20}),
    "aft_cifar10_classify": ("aft_simple", {}),
    "livt_pretrain": ("aft_simple", {"train.eval_images": 20}),
    "livt_cifar10_lt": ("bce", {}),
    "segmentation": ("pvt", {"data.scenes": 40, "train.eval_images": 8, "train.batch_size": 2}),
    "recall": ("aft_simple", {"data.held_out": 64}),
    "arithmetic_addition": ("abacus", {"data.held_out": 64, "train.batch_size": 16}),
    "grammar": ("aft_simple", {"train.eval_texts": 20, "data.source": "grammar"}),
    "subwords": ("aft_simple", {"train.eval_texts": 2}),
    "masked": ("aft_simple", {"train.eval_texts": 2}),
    "spans": ("aft_simple", {"train.eval_texts": 2}),
    "sentences": ("aft_simple", {"train.eval_texts": 50}),
    "points_classify": ("external", {"data.clouds": 60, "data.held_out": 30, "data.points": 64}),
    "points_parts": ("external", {"data.clouds": 60, "data.held_out": 30, "data.points": 64}),
}
"""A small config of every task: a row of a recipe and changes to it."""


def small(name, folder):
    """Return the config of a task, on files of this test where its data are text."""
    row, changes = ON[name]
    if name == "text":
        text = folder / "text.txt"
        text.write_bytes(b"the cat sat on the mat. " * 600)
        changes = {**changes, "data.source": str(text), "data.seq_len": 32, "model.max_len": 32}
    if name in ("subwords", "masked", "spans"):
        for i in range(30):
            (folder / f"{i}.txt").write_text(f"the cat {i} sat on the mat and saw {i + 1} dogs. " * 6)
        changes = {**changes, "data.source": str(folder), "model.vocab": 400}
    return RECIPES[name].config(row).override(changes)


@pytest.mark.parametrize("name", ON)
def test_every_task_has_a_floor(name, tmp_path):
    config = small(name, tmp_path)
    task = open_task(config)
    floor, higher = task.floor(), task.higher
    assert math.isfinite(floor)
    if higher:  # below all, above nothing
        assert 0 <= floor < 1
    if name in ("aft_cifar10_classify", "recall", "points_classify"):
        assert floor < 0.25
    if name == "aft_cifar10_density":
        assert 1 < floor < 8
    if name == "text":
        assert 2 < floor < 5


def test_the_floor_of_a_classifier_is_the_share_of_the_largest_class(tmp_path):
    task = open_task(small("livt_cifar10_lt", tmp_path))
    labels = task.images.split("valid").labels
    assert task.floor() == pytest.approx(float((labels == torch.tensor(task.counts).argmax()).double().mean()))


def test_the_floor_of_a_text_is_the_entropy_of_its_bytes(tmp_path):
    config = small("text", tmp_path)
    found = yardsticks(config)
    assert set(found) == {FLOOR, "gzip -9"}
    corpus = open_task(config).corpus
    share = corpus.split("train").long().bincount(minlength=256).double()
    share = share / share.sum()
    entropy = -float((share * share.clamp_min(1e-12).log2()).sum())
    assert found[FLOOR] == pytest.approx(entropy, abs=0.05)
    assert BATCHES > 1


def results(scores, higher, floor, lengths=(), recipe="aft_cifar10_classify", beyond=None):
    """Return results of two rows with these scores by row."""
    plan = SweepPlan(recipe, {row: {} for row in scores}, rates=(0.1, 0.2, 0.4), shell="paper", lengths=lengths)
    found = Results(Path("none.json"), plan, yardsticks={FLOOR: floor} if floor is not None else {})
    for row, values in scores.items():
        one = {"row": row, "metric": "top1", "tokens": 1, "steps": 1, "seconds": 1.0, "peak_mib": 1.0, "curve": []}
        one |= {"higher": higher, "stopped": False}
        for rate in plan.rates:
            found.runs[f"tune/{row}/{rate}"] = {**one, "phase": "tune", "rate": rate, "seed": 0, "score": rate}
        best = max(plan.rates) if higher else min(plan.rates)
        for seed, score in enumerate(values):
            record = {**one, "phase": "final", "rate": best, "seed": seed, "score": score}
            record |= {"beyond": beyond[row][seed]} if beyond else {}
            found.runs[f"final/{row}/{seed}"] = record
    return found


@pytest.mark.parametrize("higher", [True, False])
def test_rows_at_the_floor_have_no_verdict(higher):
    sign = 1 if higher else -1
    good, chance = ([0.5 + sign * shift + e for e in (-0.001, 0.0, 0.001)] for shift in (0.2, 0.0005))
    found = compare(results({"a": good, "b": chance}, higher, 0.5), "a", "b")
    assert found.verdict == "cannot be tested"
    score = f"{sum(chance) / 3:.3f} +- 0.002"  # half of the 95 % interval; without it, the mean would seem to be above
    assert found.why == (f"b: not above the floor ({score} against 0.500 of {FLOOR})",)
    assert compare(results({"a": good, "b": [x - sign * 0.1 for x in good]}, higher, 0.5), "a", "b").verdict == "better"
    assert compare(results({"a": chance, "b": chance}, higher, 0.5), "a", "b").verdict == "cannot be tested"


def test_a_row_is_not_compared_with_itself():
    with pytest.raises(MixerError, match="cannot be compared with itself"):
        compare(results({"a": [0.7, 0.71, 0.72]}, True, 0.1), "a", "a")


def test_results_without_a_floor_have_no_verdict():
    found = results({"a": [0.7, 0.71, 0.72], "b": [0.6, 0.61, 0.62]}, True, None)
    assert compare(found, "a", "b").verdict == "cannot be tested"
    assert shortcomings(found) == ["the results hold no floor, the score of a predictor that reads nothing"]


def test_a_claim_beyond_the_lengths_of_training_needs_those_learned():
    beyond = {"a": [0.5, 0.51, 0.52], "b": [0.1, 0.11, 0.12]}
    lengths = {"lengths": (4, 16), "recipe": "arithmetic_addition", "beyond": beyond}
    learned, not_yet = [0.99, 0.985, 0.98], [0.87, 0.871, 0.887]
    assert compare(results({"a": learned, "b": learned}, True, 0.1, **lengths), "a", "b").verdict == "better"
    found = compare(results({"a": learned, "b": not_yet}, True, 0.1, **lengths), "a", "b")
    assert found.verdict == "cannot be tested"
    assert found.why == ("b: has not learned the lengths of its training (0.876 right, needs 0.95)",)
    nothing = {**lengths, "beyond": {**beyond, "b": [0.0, 0.0, 0.0]}}  # beyond, a row may well fail altogether
    assert compare(results({"a": learned, "b": learned}, True, 0.1, **nothing), "a", "b").verdict == "better"
