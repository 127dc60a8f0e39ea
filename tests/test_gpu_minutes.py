"""Rehearse what runs on a GPU, in Triton's interpreter on small sizes, so that no minute is lost to an error."""

from __future__ import annotations

import json

import torch

import gpu_minutes
from triton_process import HERE, run


def test_both_calls_end_to_end(tmp_path):
    out = tmp_path / "minutes.json"
    script = str(HERE.parent / "benchmarks/gpu_minutes.py")
    run(script, "1", "2", "--rehearse", "--seconds", "3000", "--out", str(out))
    report = json.loads(out.read_text())
    parts = {name: rows for name, rows in report.items() if isinstance(rows, list)}
    assert list(parts) == ["compilation", "profile", "graphs", "checks", "times", "training"]
    rows = [row for part in parts.values() for row in part]
    assert not [row for row in rows if "not reached" in row or "no kernel" in row]
    failed = {row["form"] for row in rows if "failed" in row}
    assert failed <= {"fla linear attention", "flex sliding window"}  # flex attention has no gradient on a CPU
    assert all(row["equal"] for row in parts["graphs"])
    assert all(row["kept"] for row in parts["checks"])
    assert len({row["form"] for row in parts["checks"]}) == 13
    assert [row.get("equal to the bit") for row in parts["training"]] == [None, True, None]
    assert {row["form"] for row in parts["profile"]} == set(gpu_minutes.REHEARSED.forms)
    assert all(row["us and launches"] for row in parts["profile"])


def test_a_rehearsal_checks_every_form_and_a_run_times_all_causal_ones(monkeypatch):
    monkeypatch.setattr(gpu_minutes, "DEVICE", "cpu")
    forms = gpu_minutes.forms(9, 8, 2, torch.float32)
    assert len(forms) == 13
    assert gpu_minutes.timed_names(9, gpu_minutes.Sizes()) == [name for name in forms if "causal" in name]
