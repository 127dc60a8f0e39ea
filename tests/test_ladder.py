"""The ladder shows rows of its sweep, each measured, and compares each with a row that is there."""

from __future__ import annotations

import json

import pytest
import torch

import ladder
from tokenmix import MixerError, build_mixer
from tokenmix.lab.sweep.modules import load_modules

PARTS = ladder.opened("aft_parts")
RECORD = json.loads(ladder.RECORD.read_text())


def test_every_rung_is_a_row_of_the_sweep_and_is_measured():
    rows = [rung.row for rung in ladder.RUNGS]
    assert set(rows) == set(PARTS.plan.rows) == set(RECORD["rungs"])
    assert len(rows) == len(set(rows))
    for i, rung in enumerate(ladder.RUNGS):
        assert rung.base is None if i == 0 else rung.base in rows[:i]


def test_the_table_shows_what_has_run_and_names_the_rest():
    text = ladder.table(RECORD)
    first = [line.split("|")[1].strip(" `") for line in text.splitlines() if line.startswith("| `")]
    assert first == [rung.row for rung in ladder.RUNGS if PARTS.scores(rung.row)]
    for rung in ladder.RUNGS:
        assert f"`{rung.row}`" in text


def test_states_are_those_of_a_growing_history_and_of_a_few_tokens():
    """Keys and values of 4 layers x 128 features in float32 beside some bytes a token; three tokens and three sums."""
    kept = {row: found["state_bytes"] for row, found in RECORD["rungs"].items()}
    assert 0 <= kept["attention"] - RECORD["context"] * 4 * 2 * 128 * 4 < RECORD["context"] * 4 * 16
    assert 0 <= kept["aft_forget"] - 4 * (3 * 3 * 128 * 4 + 3 * 128 * 8) < 1024


@pytest.mark.usefixtures("controls")
def test_controls_keep_to_masks_or_refuse_them():
    load_modules(PARTS.plan.modules)
    x, mask = torch.randn(1, 6, 8), torch.arange(6)[None] >= 2
    then = {"name": "attention", "heads": 2}
    convolved = build_mixer("convolved", dim=8, causal=True, then=then)
    torch.testing.assert_close(convolved(x, key_mask=mask)[:, 2:], convolved(x[:, 2:]))
    with pytest.raises(MixerError, match="takes neither a key_mask nor positions"):
        build_mixer("attention_with_parts", dim=8, causal=True, heads=2)(x, key_mask=mask)
    with pytest.raises(MixerError, match="no bidirectional form"):
        build_mixer("attention_with_parts", dim=8, heads=2, conv=False)


@pytest.mark.usefixtures("controls")
@pytest.mark.parametrize("row", ["aft_forget", "attention, all parts"])
def test_a_rung_is_measured(row, monkeypatch):
    monkeypatch.setattr(ladder, "CONTEXT", 40)
    load_modules(PARTS.plan.modules)
    found = ladder.measured(PARTS.plan, row)
    streams = row == "aft_forget"
    assert (found["state_bytes"] is not None) == (found["ms_per_token"] is not None) == streams
