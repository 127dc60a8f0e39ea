"""The page of efficiencies shows what its record holds, and asks for every table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import docs_efficiencies
import efficiencies
from tokenmix.models import LMConfig, build_model

PAGE = (Path(__file__).parent.parent / "docs/efficiencies.md").read_text()
RECORD = json.loads(docs_efficiencies.RECORD.read_text())


def test_the_page_asks_for_every_table_and_says_how_it_was_measured():
    assert docs_efficiencies.MARK.findall(PAGE) == list(docs_efficiencies.TABLES)
    assert f"{RECORD['tokens']:,} bytes" in PAGE
    assert f"first {efficiencies.SCORED:,} bytes" in PAGE
    assert f"{RECORD['adapt_steps']} steps of {efficiencies.BATCH} x {efficiencies.LENGTH} bytes" in PAGE
    assert f"rank {RECORD['rank']} " in PAGE


@pytest.mark.parametrize("part", efficiencies.PARTS)
def test_every_row_was_measured(part):
    assert tuple(RECORD[part]) == efficiencies.PARTS[part][1]


@pytest.mark.parametrize("name", docs_efficiencies.TABLES)
def test_a_table_holds_a_line_for_each_measurement(name):
    part, head, _ = docs_efficiencies.TABLES[name]
    lines = docs_efficiencies.table(RECORD, name).split("\n")
    assert {line.count("|") for line in lines} == {len(head) + 1}
    inner = {"int8": lambda found: [found], "drift": lambda found: found["drift"]}.get(name, lambda found: found)
    assert len(lines) - 2 == sum(len(inner(found)) for found in RECORD[part].values())
    assert "Not measured yet" in docs_efficiencies.table({}, name)


def test_measurements_follow_from_each_other():
    for found in RECORD["shared"].values():
        assert (
            found["1 layer, 4 times"]["parameters"] == found["1 layer"]["parameters"] < found["4 layers"]["parameters"]
        )
    for mixer, found in RECORD["int8"].items():
        assert 3 < found["bytes"] / found["int8_bytes"] < 4
        marks = [mark for mark in efficiencies.MARKS if mixer != "attention" or mark <= efficiencies.GROWING_LONGEST]
        assert [int(mark) for mark in found["drift"]] == marks
    for mixer, found in RECORD["lora"].items():
        assert found["before"]["bits_before"] == RECORD["shared"][mixer]["4 layers"]["bits"]
        assert 0 < found["lora"]["trainable"] < found["all weights"]["trainable"] / 10
        assert found["all weights"]["trainable"] == RECORD["shared"][mixer]["4 layers"]["parameters"]


def test_distances_are_zero_between_equal_models_and_bytes_are_counted():
    torch.manual_seed(0)
    model = build_model(LMConfig(dim=16, max_len=8, mixers=({"name": "linear", "heads": 2},), positions=None)).eval()
    for each in efficiencies.drift(model, model, [1000, 1500]).values():
        assert (each["logits"], each["states"], each["bits"] - each["int8_bits"]) == (0, 0, 0)
    small = efficiencies.quantized(model)
    assert efficiencies.drift(model, small, [1000])["1000"]["logits"] > 1e-4
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    assert efficiencies.weight_bytes(model) - efficiencies.weight_bytes(small) == 3 * weights
    off = [
        (p - q).abs().max() for p, q in zip(model.parameters(), efficiencies.rounded(model).parameters(), strict=True)
    ]
    assert 0 < max(off) < 1e-3
