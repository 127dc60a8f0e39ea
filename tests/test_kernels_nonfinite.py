"""Test NaN and infinity in keys, values, weights and queries, through every C kernel and decoding.

What may attend them is not finite, the rest is what it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nonfinite_checks import FORMS, check, check_stream, poisons
from tokenmix import functional
from tokenmix.kernels import cpu
from tokenmix.kernels.cpu import build

HERE = Path(__file__).parent
NAMES = list(build.instruction_sets())  # best first
LESSER = NAMES[NAMES.index(str(cpu.isa())) + 1 :] if cpu.isa() in NAMES else []
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "aft_simple": ("aft_simple", {}),
    "aft_local": ("aft_local", {"window": 9, "max_len": 300, "init_std": 0.5}),
    "aft_local wide": ("aft_local", {"window": 100, "max_len": 300, "init_std": 0.5}),
    "aft_conv": ("aft_conv", {"heads": 4, "kernel_size": 7, "reparam": False, "init_std": 1.0}),
    "aft_full": ("aft_full", {"max_len": 300, "init_std": 0.5}),
    "aft_forget": ("aft_forget", {"key_norm": False, "kernel_size": 1}),
    "aft_pairs": (
        "aft_pairs",
        {"heads": 4, "rank": 3, "norm": False, "key_norm": False, "kernel_size": 1},
    ),
    "hydra": ("hydra", {}),
    "hydra mean": ("hydra", {"feature": "mean"}),
    "linear": ("linear", {"heads": 4}),
}
ROWS = [
    pytest.param(name, causal, id=f"{name}{' causal' * causal}")
    for name, form in FORMS.items()
    for causal in form.causal
]


@pytest.mark.parametrize(("name", "causal"), ROWS)
def test_only_rows_that_may_attend_it_are_not_finite(name, causal):
    for poison in poisons(FORMS[name], all_of_them=False):
        check(name, causal, *poison)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "causal"), ROWS)
def test_at_any_place_in_any_precision(name, causal, dtype):
    for poison in poisons(FORMS[name], all_of_them=True):
        check(name, causal, *poison, dtype)


@pytest.mark.parametrize("row", STREAMS)
def test_a_stream_stays_poisoned_from_there_on(row):
    check_stream(STREAMS[row])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "form", ["aft_simple", "aft_full", "aft_local", "aft_conv", "linear", "hydra", "hydra softmax"]
)
def test_a_layer_that_diverged_does_not_train_on(form, causal):
    """All keys NaN: no output and no gradient of keys is finite."""
    q, k, v = (torch.randn(2, 40, 6, requires_grad=True) for _ in range(3))
    run, options = FORMS[form].function, {**FORMS[form].options, "causal": causal, "backend": "cpu"}
    more = [
        torch.randn(*s).requires_grad_()
        for s in {"aft_full": [(40, 40)], "aft_local": [(40, 40)], "aft_conv": [(6, 5)]}.get(form, [])
    ]
    y = run(q, k * float("nan"), v, *more, **options)
    assert not y.isfinite().any()
    y.sum().backward()
    assert not k.grad.isfinite().any()


@pytest.mark.parametrize("norm", ["double", "tokens"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_external_attention_normalises_over_all_tokens(norm, value):
    x, memory_k, memory_v = torch.randn(2, 70, 6), torch.randn(5, 6), torch.randn(5, 6)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[:, 7] = False
    want = functional.external(x, memory_k, memory_v, norm=norm, key_mask=mask, backend="cpu")
    x[0, 7] = value
    assert torch.equal(functional.external(x, memory_k, memory_v, norm=norm, key_mask=mask, backend="cpu"), want)
    x[0, 33] = value
    x.requires_grad_()
    y = functional.external(x, memory_k, memory_v, norm=norm, key_mask=mask, backend="cpu")
    assert not y[0][mask[0]].isfinite().any()
    assert torch.equal(y[1], want[1])
    y[1].sum().backward(retain_graph=True)
    assert x.grad[1].isfinite().all()
    (grad,) = torch.autograd.grad(y.sum(), x)
    met = mask[0].clone()
    met[33] = False  # that of the bad token itself says nothing
    assert not grad[0][met].isfinite().any()
    assert grad[1].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("isa", LESSER)
def test_the_other_instruction_sets(isa):
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    env = {**os.environ, "TOKENMIX_ISA": isa, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(HERE / Path(__file__).name)],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.count(".") > len(ROWS), done.stdout
