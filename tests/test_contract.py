"""Every promise of the contract on every row of CASES, bidirectional and causal; each test is one promise of one mixer."""

from __future__ import annotations

import importlib.util

import pytest

from cases import CASES, GRIDS, forms
from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.mixers import CORE
from tokenmix.testing import PROMISES, run_promise, subject

DIM = 8


def subject_of(case: str, causal: bool):
    """The subject of one test."""
    name, options = CASES[case]
    grid, prefix = GRIDS.get(case, (None, 0))
    return subject(name, {**options, "causal": causal}, dim=DIM, grid=grid, prefix=prefix)


def promised() -> list:
    """(case, causal, promise): everything, of which the exports of opponents are left to `make test-all`; they take longer than all the rest together."""
    rows = []
    for case, causal in forms():
        for promise in PROMISES:
            late = promise.startswith("exports") and CASES[case][0] not in CORE
            rows.append(
                pytest.param(case, causal, promise, marks=[pytest.mark.slow] if late else [], id=f"{case}-{'causal' if causal else 'both-ways'}-{promise}")
            )
    return rows


@pytest.mark.parametrize(("case", "causal", "promise"), promised())
def test_promise(case, causal, promise):
    result = run_promise(subject_of(case, causal), promise, PROMISES[promise])
    assert result.status in ("kept", "excepted", "not applicable"), str(result)


def test_every_mixer_has_a_case():
    assert {name for name, _ in CASES.values()} == set(MIXERS)


@pytest.mark.parametrize("case", GRIDS)
def test_cases_on_grids_have_no_causal_form(case):
    name, options = CASES[case]
    with pytest.raises(MixerError, match="causal"):
        build_mixer(name, DIM, **options, causal=True)


def test_onnx_is_installed_here():
    assert all(importlib.util.find_spec(p) for p in ("onnx", "onnxscript", "onnxruntime"))


def test_what_does_not_apply_is_known():
    """A promise may only be skipped where the mixer lacks the thing it is about; nothing is skipped in silence."""
    may = {
        "future_cannot_reach_past",
        "past_reaches_present",
        "token_before_reaches",
        "attn_mask_equals_causal",
        "pairs_with_nothing_to_attend",
        "merge_joins_stretches",
        "context_streams",
    }
    may |= {"context_of_itself", "packed_equals_separate"}
    streams = {p for p in PROMISES if PROMISES[p].__module__.endswith("streaming")}
    for case, causal in (("attention", True), ("aft_simple", True), ("aft_conv-2d", False)):
        s = subject_of(case, causal)
        cheap = [p for p in PROMISES if p in may | streams or p.startswith("refuses")]
        skipped = {p for p in cheap if run_promise(s, p, PROMISES[p]).status == "not applicable"}
        assert skipped <= may | (streams if case in GRIDS else set())
