"""`tokenmix new-mixer` writes a mixer that keeps the contract before a line of it is edited."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmix import MixerError
from tokenmix.testing.new_mixer import LONGEST, new_mixer
from tokenmix.testing.skeletons import SKELETONS

ROOT = Path(__file__).parent.parent
PLACES = 5 + 1  # five by hand, and the table in the README, which follows from the code
PROMISES = [
    "equals_reference",
    "streaming_equals_parallel",
    "future_cannot_reach_past",
    "non_finite_is_honest",
    "gradients_of_non_finite_are_honest",
    "builds_on_meta",
    "runs_under_autocast",
    "refuses_wrong_options",
]


@pytest.fixture
def checkout(tmp_path):
    for part in ("src/tokenmix", "tests", "docs/mixers"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


@pytest.mark.parametrize("like", SKELETONS)
def test_a_new_mixer_keeps_the_contract(checkout, like):
    before = files(checkout)
    written = new_mixer("gated_mean", checkout, like)
    assert set(written) == {path for path, held in files(checkout).items() if before.get(path) != held}
    assert len(written) == PLACES
    code = f"""
import sys
sys.path[:0] = [{str(checkout / "src")!r}, {str(checkout / "tests")!r}]
import cases
from tokenmix import MIXERS
from tokenmix.testing import PROMISES, run_promise
for causal in MIXERS["gated_mean"].facts.causal_forms():
    for promise in {PROMISES}:
        result = run_promise(cases.subject_of("gated_mean", causal), promise, PROMISES[promise])
        needs_causal = promise in ("streaming_equals_parallel", "future_cannot_reach_past")
        assert result.status == "kept" or needs_causal and not causal, result
from tokenmix.contrib.gated_mean import GatedMeanState
assert not set(GatedMeanState._fields) & set(dir(tuple)), "mypy refuses a field that hides a method of tuple"
print("kept")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=checkout)
    assert done.stdout == "kept\n", done.stderr
    lint(written)


def test_a_recurrence_is_causal_only_and_keeps_its_state_in_float32(checkout):
    new_mixer("gated_mean", checkout, "recurrent")
    code = f"""
import sys
sys.path[:0] = [{str(checkout / "src")!r}]
import torch
from tokenmix import build_mixer
mixer = build_mixer("gated_mean", 8, heads=2).bfloat16()
_, state = mixer.extend(torch.randn(3, 5, 8).bfloat16(), mixer.init_state(3))
print(mixer.facts.causal_only, tuple(state.memory.shape), state.memory.dtype)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=checkout)
    assert done.stdout == "True (3, 2, 4, 4) torch.float32\n", done.stderr


@pytest.mark.parametrize("like", SKELETONS)
@pytest.mark.parametrize("letters", [1, LONGEST])
def test_its_lines_are_narrow_enough_for_any_name(checkout, letters, like):
    lint(new_mixer("q" * letters, checkout, like))


def test_a_kind_that_does_not_exist_is_refused(checkout):
    with pytest.raises(MixerError, match="--like takes pointwise, attention, recurrent, got 'gated'"):
        new_mixer("gated_mean", checkout, "gated")


def files(checkout):
    """What each file holds, but bytecode."""
    return {p: p.read_bytes() for p in checkout.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


def lint(written):
    code = [w for w in written if w.suffix in (".py", ".pyi")]
    for verb in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *verb, "--no-cache", "--config", ROOT / "pyproject.toml", *code]
        ruff = subprocess.run(command, capture_output=True, text=True)
        assert ruff.returncode == 0, ruff.stdout


def test_nothing_is_overwritten(checkout):
    page = checkout / "docs/mixers/gated_mean.md"
    page.write_text("mine")
    with pytest.raises(MixerError, match=r"new-mixer: 'gated_mean' is taken \(docs/mixers/gated_mean.md\)"):
        new_mixer("gated_mean", checkout)
    assert page.read_text() == "mine"
    assert not (checkout / "src/tokenmix/contrib/gated_mean.py").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Gated", "lower-case identifier"),
        ("class", "lower-case identifier"),
        ("../up", "lower-case identifier"),
        ("q" * (LONGEST + 1), f"at most {LONGEST} fit"),
        ("hydra", "is taken"),
        ("fresh", "not a checkout"),
    ],
)
def test_wrong_names_and_places_are_refused(tmp_path, checkout, name, said):
    with pytest.raises(MixerError, match=said):
        new_mixer(name, tmp_path / "elsewhere" if said == "not a checkout" else checkout)


def test_make_quick_runs_no_test_where_it_cannot_tell_which(tmp_path):
    for tool, script in {
        "ruff": "exit 0",
        "mypy": "exit 0",
        "python": f'case "$*" in *pytest*) echo "$@" >> {tmp_path}/asked ;; *nosuch*) exit 1 ;; *) echo a_test ;; esac',
    }.items():
        (tmp_path / tool).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / tool).chmod(0o755)
    make = ["make", "-C", str(ROOT), "-o", "setup", "quick", f"BIN={tmp_path}"]
    assert subprocess.run([*make, "M=nosuch"], capture_output=True).returncode != 0
    assert not (tmp_path / "asked").exists()
    assert subprocess.run([*make, "M=hydra"], capture_output=True).returncode == 0
    assert (tmp_path / "asked").read_text() == "-m pytest -n 2 a_test\n"
