"""Test the contract on one backend at a time, in float32.

The backends are the eager form, which `auto` leaves where there is a kernel, and the C kernels. The plain suite builds
most mixers in float64, which always runs eagerly. Here everything that it builds in float64 is built in float32
instead, compared with references in float64, and no call may fall back: what a backend lacks it refuses, and each
promise that meets a refusal stands in ``REFUSED``.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cases import CASES, forms, subject_of
from test_contract import promised
from tokenmix import MIXERS, use_backend
from tokenmix.testing import PROMISES, Subject, run_promise

KERNELS = {name for name, cls in MIXERS.items() if cls.facts.kernels.whole}  # rows whose functional form has a C kernel
FAMILIES = (*sorted(KERNELS), "multihead_linear")
ELSEWHERE = {
    "options_are_json": "no numbers",
    "declares_waivers": "no numbers",
    "refuses_what_it_cannot": "no numbers",
    "refuses_wrong_inputs": "no numbers",
    "refuses_wrong_options": "no numbers",
    "state_bytes_counts": "no numbers",
    "builds_on_meta": "no numbers",
    "differentiable_twice": "is about the eager form in float64, which it asks for itself",
    "changes_dtype": "is about float64 and back",
    "same_under_another_default_dtype": "chooses its dtypes itself, float32 among them",
    "right_or_refused_when_traced": "traced programs are eager ones: the plain suite",
    "compiles": "of a kernel: tests/test_kernels_*.py; of eager: the plain suite, in float64",
    "exports": "exported programs are eager ones: the plain suite",
    "exports_to_onnx": "exported programs are eager ones: the plain suite",
}
"""Promises that are not asked here, and why."""

NO_PAIRS, NO_PLACES = "the kernels take no attn_mask", "the kernels take no positions"
REFUSED: dict[tuple[str, str], str] = {
    **{
        (p, row): NO_PAIRS
        for p in ("attn_mask_equals_causal", "pairs_with_nothing_to_attend", "equals_reference", "non_finite_is_honest")
        for row in ("aft_full", "aft_local")
    },
    **{(p, "aft_conv"): NO_PLACES for p in ("equals_reference", "subset_equals_masked")},
    **{(p, "aft_conv causal"): NO_PLACES for p in ("streaming_equals_parallel", "segments_compose")},
    ("runs_under_autocast", "polynl"): "the input stands for q, and is not in the projections' dtype",
    ("finite_at_large_keys", "polynl causal"): "what overflows is computed once more in float64",
    ("finite_at_large_keys", "mamba2 causal"): "what overflows is computed once more in float64",
}
"""(promise, row or row and direction) that meet something no kernel has, and what that is."""

CAUSAL = ("aft_forget", "aft_reach", "aft_pairs")
WHOLE = {
    **{f"{case} both ways": "its kernel is causal" for case, (row, _) in CASES.items() if row in CAUSAL},
    **{
        case: "signed filters, or numerators alone"
        for case, (row, options) in CASES.items()
        if row == "aft_conv" and (options.get("filters") == "signed" or not options.get("divide", True))
    },
    "aft_local-none": "outside='none'",
    "aft_local-t5": "outside='none'",
    "aft_conv-none": "outside='none'",
    "aft_conv-3d": "three dimensions",
    "external causal": "a causal form",
    "external-tied causal": "a causal form",
    "external-exact causal": "a causal form",
    "external_multihead causal": "a causal form",
}
"""List cases, or cases in one direction, that no kernel has at all.

A promise that needs no forward pass is kept all the same.
"""


def refused(case: str, causal: bool, promise: str) -> bool:
    """Whether this promise must meet a refusal."""
    row, tail = CASES[case][0], " causal" if causal else ""
    return any((promise, name) in REFUSED for name in (row, row + tail))


class Subject32(Subject):
    """A subject whose float64 is float32."""

    def build(self, *, dtype: torch.dtype = torch.float32, seed: int | None = None, **overrides: Any) -> Any:
        """The mixer in eval mode, in float32 where float64 is asked for."""
        return super().build(dtype=narrow(dtype), seed=seed, **overrides)

    def x(
        self, rows: int = 2, length: int | None = None, *, stream: int = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Seeded input, in float32 where float64 is asked for."""
        return super().x(rows, length, stream=stream, dtype=narrow(dtype))

    def call(self, mixer: Any, x: Tensor, context: Tensor | None = None, **given: Any) -> Tensor:
        """forward; inputs that a promise makes itself may be float64."""
        return super().call(mixer, narrowed(x), narrowed(context), **given)

    def args(self, mixer: Any, x: Tensor, context: Tensor | None = None, **given: Any) -> tuple[tuple, dict[str, Any]]:
        """Arguments of the functional form."""
        return super().args(mixer, narrowed(x), narrowed(context), **given)


def narrow(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


def narrowed(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.to(narrow(x.dtype))


def subject32(case: str, causal: bool) -> Subject32:
    """The subject of a case in float32, its reference in float64."""
    s = subject_of(case, causal)
    found = {name: getattr(s, name) for name in s.__dataclass_fields__}

    @functools.wraps(s.reference)
    def wide(*args: Any, **options: Any) -> Tensor:
        doubled = pytree.tree_map(
            lambda a: a.double() if isinstance(a, Tensor) and a.is_floating_point() else a, (args, options)
        )
        return s.reference(*doubled[0], **doubled[1]).to(args[0].dtype)

    return Subject32(**{**found, "reference": wide})


def rows(names: tuple[str, ...] | set[str]) -> list:
    asked = [p for p in PROMISES if p not in ELSEWHERE]
    chosen = [(case, causal) for case, causal in forms() if CASES[case][0] in names]
    return [
        pytest.param(case, causal, p, id=f"{case}-{'causal' if causal else 'both-ways'}-{p}")
        for case, causal in chosen
        for p in asked
    ]


@pytest.mark.parametrize(("case", "causal", "promise"), rows(FAMILIES))
def test_eager(case, causal, promise):
    with use_backend("eager"):
        result = run_promise(subject32(case, causal), promise, PROMISES[promise])
    assert result.status in ("kept", "waived", "not applicable"), str(result)


@pytest.mark.parametrize(("case", "causal", "promise"), rows(KERNELS))
def test_cpu(case, causal, promise):
    with use_backend("cpu"):
        result = run_promise(subject32(case, causal), promise, PROMISES[promise])
    whole = case in WHOLE or f"{case} {'causal' if causal else 'both ways'}" in WHOLE
    if result.status == "crashed" and (whole or refused(case, causal, promise)):
        assert "MixerError" in result.reason
        assert "backend='cpu'" in result.reason
        with use_backend("auto"):  # and where the eager form may stand in, the promise is kept
            result = run_promise(subject32(case, causal), promise, PROMISES[promise])
    else:
        assert whole or not refused(case, causal, promise) or result.status == "not applicable", (
            "refused no more: take it off the list"
        )
    assert result.status in ("kept", "waived", "not applicable"), str(result)


def test_the_list_of_what_is_checked_does_not_shrink():
    """`make test-all` checks every promise on every case, in both directions, on every backend; these were its rows."""
    every = {(case, causal, promise) for case, causal in forms() for promise in PROMISES}
    assert {tuple(row.values) for row in promised()} == every
    for rows_of, names in ((rows(FAMILIES), FAMILIES), (rows(KERNELS), KERNELS)):
        wanted = {row for row in every if CASES[row[0]][0] in names and row[2] not in ELSEWHERE}
        assert {tuple(row.values) for row in rows_of} == wanted
    assert (len(CASES), len(PROMISES)) >= (156, 54)
    assert len(every) >= 15_120
    assert (len(rows(FAMILIES)), len(rows(KERNELS))) >= (4_200, 3_960)


def test_the_tables_are_about_what_exists():
    assert set(ELSEWHERE) <= set(PROMISES)
    assert {case.removesuffix(" causal").removesuffix(" both ways") for case in WHOLE} <= set(CASES)
    for promise, row in REFUSED:
        assert promise in PROMISES
        assert promise not in ELSEWHERE
        assert row.removesuffix(" causal") in KERNELS


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_the_kernel_is_what_runs(name, monkeypatch):
    """Under use_backend("cpu") a mixer calls the library, and gives other bits than the eager form."""
    case = next(case for case, (row, _) in CASES.items() if row == name)
    s = subject32(case, f"{case} both ways" in WHOLE or MIXERS[name].facts.causal_only)
    x = s.x(2, s.length)
    found = {}
    for backend in ("cpu", "eager", "auto"):
        with use_backend(backend):
            found[backend] = s.call(s.build(), x)
    assert torch.equal(found["auto"], found["cpu"])
    assert not torch.equal(found["eager"], found["cpu"])
    assert torch.allclose(found["eager"], found["cpu"], atol=1e-5)


WITHOUT = """
import torch, tokenmix
from tokenmix.lab import cli
from tokenmix.kernels import cpu
assert not cpu.available() and cpu.why_not() == "TOKENMIX_NO_KERNELS is set"
assert cpu.isa() is None and cpu.built_from() is None
x = torch.ones(2, 5, 8, requires_grad=True)
mixer = tokenmix.build_mixer("aft_simple", 8, causal=True)
mixer(x).sum().backward()
assert x.grad.isfinite().all()
for ask in (
    lambda: tokenmix.use_backend("cpu").__enter__(),
    lambda: tokenmix.functional.aft_simple(x, x, x, backend="cpu"),
):
    try:
        ask()
    except tokenmix.MixerError as why:
        print("refused:", why)
assert cli.main(["doctor"]) == 0
"""


def test_without_kernels_all_else_works():
    env = {**os.environ, "TOKENMIX_NO_KERNELS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        done.stdout.count("refused: backend='cpu': TOKENMIX_NO_KERNELS is set; use 'auto' or 'eager' until then.") == 2
    )
    assert "kernels  C: not in use: TOKENMIX_NO_KERNELS is set" in done.stdout
    assert "all well" in done.stdout
