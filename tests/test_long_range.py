"""Sets of long sequences: labels as independent evaluators find them, splits that share nothing, equal labels."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab.data import LABELLED_SETS, long_range, open_labelled
from tokenmix.lab.data.long_range import DASH, EMPTY, END, LONG_SETS, draw_rows
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.sweep.plan import SweepPlan
from tokenmix.lab.train import match_data
from tokenmix.lab.train.tasks import open_task
from tokenmix.models import build_model

ROOT = Path(__file__).parents[1]


def draw(name, room, count=200):
    rng = random.Random(1)
    return [LONG_SETS[name].draw(rng, room) for _ in range(count)]


@pytest.fixture
def few(monkeypatch):
    """Make the sets small."""
    long_range._draw_rows.cache_clear()
    monkeypatch.setattr(long_range, "ROWS", {"train": 200, "valid": 40, "test": 40})
    yield
    long_range._draw_rows.cache_clear()


def read_list(text):
    """Evaluate an expression with a stack, from its end: the arguments of an operator lie on the stack before it."""
    stack, names = [], {"M": max, "N": min, "D": statistics.median_low, "S": lambda values: sum(values) % 10}
    for character in reversed(text):
        if character == "[":
            name, values = stack.pop(), []
            while stack[-1] != "]":
                values.append(stack.pop())
            stack[-1] = names[name](values)
        else:
            stack.append(int(character) if character.isdigit() else character)
    (value,) = stack
    return value


@pytest.mark.parametrize("room", [8, 60, 250])
def test_the_label_of_a_list_is_its_value(room):
    rows = draw("listops", room)
    assert all(str(read_list(text)) == label and room // 2 <= len(text) <= room for text, label in rows)
    assert read_list("[M29[N47]0]") == 9
    assert read_list("[D1[S99]3[N15]]") == 1


def spread(text):
    """Return the pixels that dashes and ends join to the first end, over gaps of one pixel, and the other end."""
    side = int(len(text) ** 0.5)
    drawn = {divmod(i, side): pixel for i, pixel in enumerate(text) if pixel != EMPTY}
    start, goal = (cell for cell, pixel in drawn.items() if pixel == END)
    reached, left = set(), [start]
    while left:
        y, x = left.pop()
        if (y, x) in drawn and (y, x) not in reached:
            reached.add((y, x))
            left += [(y + dy, x + dx) for dy in range(-2, 3) for dx in range(-2, 3)]
    return reached, goal


@pytest.mark.parametrize("room", [64, 100, 256, 300])
def test_two_ends_are_joined_where_a_flood_over_the_dashes_reaches_one_from_the_other(room):
    rows = draw("pathfinder", room)
    assert {len(text) for text, _ in rows} == {int(room**0.5) ** 2}
    assert {c for text, _ in rows for c in text} == {EMPTY, DASH, END}
    for text, label in rows:
        reached, goal = spread(text)
        assert (goal in reached) == (label == "joined")
        assert len(reached) < len(text) - text.count(EMPTY)  # there is another path


def test_the_distance_of_two_ends_tells_no_label():
    far = {"joined": [], "apart": []}
    for text, label in draw("pathfinder", 144, 1000):
        a, b = (divmod(i, 12) for i, pixel in enumerate(text) if pixel == END)
        far[label].append(((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5)
    means, spreads = ([f(far[label]) for label in far] for f in (statistics.mean, statistics.stdev))
    assert abs(means[0] - means[1]) < 4 * max(spreads) * (2 / 500) ** 0.5


def test_documents_of_one_source_share_their_letters():
    shared = {"same": [], "other": []}
    for first, second, label in draw("retrieval", 200):
        assert len(first) == len(second) == 100
        usual = [{c for c, n in Counter(text).items() if n > 4} for text in (first, second)]
        shared[label].append(len(usual[0] & usual[1]) / len(usual[0] | usual[1]))
    assert statistics.mean(shared["same"]) > 0.75
    assert statistics.mean(shared["other"]) < 0.35


@pytest.mark.parametrize("name", LONG_SETS)
def test_splits_are_disjoint_equal_in_labels_and_the_same_each_time(name, few):
    rows, labels = open_labelled(name, room=100)
    assert labels == sorted(LONG_SETS[name].labels)
    texts = [row[:-1] for split in ("train", "valid", "test") for row in rows.split(split)]
    assert len(set(texts)) == len(texts) == 280
    for split in ("train", "valid", "test"):
        assert len(set(Counter(row[-1] for row in rows.split(split)).values())) == 1
    long_range._draw_rows.cache_clear()
    assert draw_rows(name, 100).sha256 == rows.sha256
    assert draw_rows(name, 101).sha256 != rows.sha256
    assert name in LABELLED_SETS


@pytest.mark.parametrize("name", LONG_SETS)
def test_a_row_fits_into_the_tokens_of_the_config_and_the_floor_is_chance(name, few):
    changes = {"data.source": name, "data.max_tokens": 105, "model.max_len": 105, "train.eval_texts": 40}
    task = open_task(match_data(RECIPES["long_range"].config("aft_simple").override(changes)))
    rows = task.text.split("train")
    for row, tokens in zip(rows, task.tokens_of(rows), strict=True):
        assert len(tokens) == sum(map(len, row[:-1])) + 1 + 2 * (len(row) - 1) <= 105  # nothing is cut off or merged
    assert task.floor() == pytest.approx(1 / len(LONG_SETS[name].labels))


def test_what_has_no_room_is_refused():
    with pytest.raises(MixerError, match="a row of pathfinder needs room for 64 characters, got 63"):
        open_labelled("pathfinder", room=63)


@pytest.mark.parametrize("row", RECIPES["long_range"].rows)
def test_every_row_reads_padded_texts_of_both_sides(row):
    config = RECIPES["long_range"].config(row).override({"data.max_tokens": 64, "model.max_len": 64})
    model = build_model(config.model).eval()
    tokens = torch.randint(4, 260, (2, 60))
    mask = torch.arange(60) < torch.tensor([[60], [50]])
    with torch.no_grad():
        said = model(tokens, mask)
        assert said.shape == (2, 10)
        changed = tokens.index_fill(1, torch.tensor([55]), 7)
        assert torch.equal(model(changed, mask)[1], said[1])


@pytest.mark.parametrize("plan", sorted((ROOT / "benchmarks/sweeps").glob("long_range_*.json")), ids=lambda p: p.stem)
def test_the_plans_have_configs(plan):
    found = SweepPlan.from_json(json.loads(plan.read_text()))
    for row in found.rows:
        assert found.without_data(row).data.source == plan.stem.removeprefix("long_range_")
