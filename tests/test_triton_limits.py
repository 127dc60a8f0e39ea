"""Test the rules for the Triton kernels at the benchmark's shape, and that the recorded limits are the code's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tokenmix.kernels.triton.aot import COUNTS, Compiled
from tokenmix.kernels.triton.launch import multiply, record_launches
from tokenmix.kernels.triton.limits import LENGTHS, benchmark_work, broken_rules, describe

ROOT = Path(__file__).parent.parent
RECORDED = json.loads((ROOT / "benchmarks/results/triton_limits.json").read_text())["rows"]
COPIED = """
scf.for %i = %a to %b {
  %x = tt.load %p : tensor<64x64x!tt.ptr<bf16>, #blocked>
  %y = ttng.warp_group_dot %e, %x, %y : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32>
}
"""
STORE = "tt.store %p, %x : tensor<64x64x!tt.ptr<bf16>>\n"
DOT = "%y = tt.dot %a, %b, %c, inputPrecision = tf32 : tensor<64x64xf32> * tensor<64x64xf32> -> tensor<64x64xf32>\n"


def compile_text(ttir: str = STORE, ttgir: str = "", registers: int = 64, shared: int = 0, **counts: int) -> Compiled:
    return Compiled("k", 90, registers, 0, shared, dict.fromkeys(COUNTS, 0) | {"STG.128": 1} | counts, (), ttir, ttgir)


@pytest.mark.parametrize(
    ("rule", "row", "programs"),
    [
        ("wide", compile_text(**{"STG.128": 0}), 264),
        ("wide", compile_text("%x = tt.load %p : tensor<64x64x!tt.ptr<bf16>>\n"), 264),
        ("room", compile_text(registers=136), 264),
        ("room", compile_text(shared=131072), 264),
        ("products", compile_text(DOT + STORE), 264),
        ("copies", compile_text(ttgir=COPIED), 264),
        ("grid", compile_text(), 263),
        ("marks", compile_text(f"scf.if %marked {{\n{STORE}}}\n"), 529),
    ],
)
def test_each_rule_is_broken_by_what_it_forbids_alone(rule, row, programs):
    assert broken_rules(row, programs, 256, half=True) == [rule]


def test_what_the_rules_allow_breaks_none():
    ahead = COPIED.replace("tt.load", "ttg.async_copy_global_to_local")
    row = compile_text(
        DOT.replace("xf32> *", "xbf16> *").replace(": tensor<64x64xf32>", ": tensor<64x64xbf16>") + STORE, ahead
    )
    assert broken_rules(row, 264, 256, half=True) == []
    assert broken_rules(compile_text(f"scf.if %marked {{\n{STORE}}}\n", **{"STG.128": 0}), 12, 256, half=True) == []
    assert broken_rules(compile_text(DOT + STORE), 264, 256, half=False) == []


def test_the_recorded_limits_are_those_of_the_code_and_keep_the_rules():
    work = [describe(w) for w in benchmark_work(LENGTHS[0])]
    assert [{name: row[name] for name in work[0]} for row in RECORDED] == work, (
        "python -m tokenmix.kernels.triton.limits --out benchmarks/results/triton_limits.json"
    )
    assert not [row for row in RECORDED if row["broken"] or row["wrong"]]


def test_no_form_at_four_times_the_length_has_a_grid_too_small():
    """Grids follow from sizes: what is right for rows of 1,024 tokens is for 4,096."""
    small = {(row["form"], row["kernel"]) for row in RECORDED if row["programs"] < 264}
    found = {(w.form, w.kernel) for w in benchmark_work(LENGTHS[1]) if w.programs < 264}
    assert found <= small


def test_a_product_of_bfloat16_is_in_float32_and_counted():
    a, b = torch.empty(1, 4, 8, dtype=torch.bfloat16, device="meta"), torch.empty(3, 8, 2, dtype=torch.bfloat16)
    out = torch.empty(3, 4, 2, device="meta")
    multiply(a.expand(3, -1, -1), b.to("meta"), out)  # there is no such product on a CPU
    with record_launches() as made:
        multiply(a.expand(3, -1, -1), b, out)
    assert [(one.kernel.__name__, one.flops) for one in made] == [("multiply", 2 * 3 * 4 * 2 * 8)]


@pytest.mark.parametrize("add", [False, True])
def test_a_product_of_float32_is_summed_in_parts(monkeypatch, add):
    monkeypatch.setattr("tokenmix.kernels.triton.launch.SUMMED", 3)
    a, b, out = (torch.randn(*shape, dtype=torch.float32) for shape in ((2, 5, 8), (2, 8, 4), (2, 5, 4)))
    want = a.double() @ b.double() + (out.double() if add else 0.0)
    multiply(a, b, out, add=add)
    assert torch.allclose(out.double(), want, atol=1e-5)


def test_a_gpu_is_offered_only_what_has_beaten_attention_on_one():
    page = (ROOT / "docs/how-to-choose-a-mixer.md").read_text()
    offered = next(row for row in page.splitlines() if "an NVIDIA GPU" in row).split("|")[2].split("`")[1::2]
    rows = json.loads((ROOT / "benchmarks/results/nvidia_h200.json").read_text())["times"]
    times = {row["form"]: row["both x SDPA causal"] for row in rows if row["T"] == 4096 and "both x SDPA causal" in row}
    faster = {name.removesuffix(" causal") for name, ratio in times.items() if ratio > 1}
    assert "aft_simple" in offered
    assert set(offered) - {"attention"} <= faster
