"""Rehearse what runs on a GPU, in Triton's interpreter on small sizes, so that no minute is lost to an error."""

from __future__ import annotations

import json

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
    assert [row.get("equal to the bit") for row in parts["training"]] == [None, True, None]
    forms = {row["form"] for row in parts["checks"]}
    assert {row["form"] for row in parts["profile"]} == {name for name in forms if "causal" in name}
    assert all(row["us and launches"] for row in parts["profile"])
