"""Test every promise of the contract on every row of CASES, bidirectional and causal.

Each test is one promise of one mixer.
"""

from __future__ import annotations

import importlib.util
from itertools import chain

import pytest
import torch

from cases import CASES, DIM, GRIDS, QUICK, forms, subject_of
from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.mixers import CORE
from tokenmix.testing import PROMISES, run_promise


def promised() -> list:
    """List every (case, causal, promise).

    Compilation and exports of extended mixers are left to `make test-all`; they take longer than all the rest together.
    """
    rows = []
    for case, causal in forms():
        for promise in PROMISES:
            if QUICK and promise.startswith(("compiles", "exports")):
                continue
            late = promise.startswith(("compiles", "exports")) and CASES[case][0] not in CORE
            rows.append(
                pytest.param(
                    case,
                    causal,
                    promise,
                    marks=[pytest.mark.slow] if late else [],
                    id=f"{case}-{'causal' if causal else 'both-ways'}-{promise}",
                )
            )
    return rows


@pytest.mark.parametrize(("case", "causal", "promise"), promised())
def test_promise(case, causal, promise):
    result = run_promise(subject_of(case, causal), promise, PROMISES[promise])
    assert result.status in ("kept", "waived", "not applicable"), str(result)


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
    may |= {"context_of_itself", "packed_equals_separate", "refuses_foreign_states"}
    streams = {p for p in PROMISES if PROMISES[p].__module__.endswith("streaming")}
    for case, causal in (("attention", True), ("aft_simple", True), ("aft_conv-2d", False)):
        s = subject_of(case, causal)
        cheap = [p for p in PROMISES if p in may | streams or p.startswith("refuses")]
        skipped = {p for p in cheap if run_promise(s, p, PROMISES[p]).status == "not applicable"}
        assert skipped <= may | (streams if case in GRIDS else set())


def resizings() -> list:
    """(case, causal, method) of everything that can be resized."""
    rows = []
    for case, causal in forms():
        mixer = subject_of(case, causal).build()
        if mixer.max_len is not None and mixer.max_len == mixer.max_context_len:
            rows += [(case, causal, way) for way in ("resize", "resize_grid") if hasattr(mixer, way)]
    return rows


def resized(mixer, way: str, length: int) -> None:
    if way == "resize":
        mixer.resize(length)
    else:
        mixer.resize_grid((1, mixer.max_len - 1), (1, length - 1), 1)


@pytest.mark.parametrize(("case", "causal", "way"), resizings())
def test_a_resized_mixer_keeps_what_its_parameters_were(case, causal, way):
    """Frozen stays frozen, dtypes and attributes stay, and gradients of the old shape are gone."""
    for frozen, dtype in ((True, torch.float64), (False, torch.bfloat16)):
        mixer = subject_of(case, causal).build().to(dtype).requires_grad_(not frozen)
        before = {
            name: (t.dtype, t.requires_grad) for name, t in chain(mixer.named_parameters(), mixer.named_buffers())
        }
        for p in mixer.parameters():
            p.grad, p.mark = None if frozen else torch.ones_like(p), "mine"
        for length in (mixer.max_len + 4, 5):
            resized(mixer, way, length)
        assert {
            name: (t.dtype, t.requires_grad) for name, t in chain(mixer.named_parameters(), mixer.named_buffers())
        } == before
        for p in mixer.parameters():
            assert p.mark == "mine"
            assert p.is_contiguous()
            assert p.grad is None or p.grad.shape == p.shape
