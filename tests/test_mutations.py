"""Test that each planted bug of mutations.py is noticed by the promise it names.

The library without bugs keeps those promises. The bugs are in Python, so the C kernels, which would step in, are
switched off; theirs are in kernel_mutations.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutations import MUTATIONS, Mutation

HERE = Path(__file__).parent
LIBRARY = HERE.parent / "src" / "tokenmix"


def copied(place: Path) -> Path:
    """A copy of the library to plant bugs in."""
    return Path(shutil.copytree(LIBRARY, place / "tokenmix", ignore=shutil.ignore_patterns("__pycache__")))


def run(place: Path, *mutations: Mutation) -> list[tuple[str, str]]:
    """Status and reason of each mutation's promise, in a fresh process that imports the copy."""
    asked = [str(a) for m in mutations for a in (m.case, m.causal, m.promise)]
    env = {
        **os.environ,
        "PYTHONPATH": f"{place}{os.pathsep}{HERE}",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TOKENMIX_NO_KERNELS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "mutations.py"), *asked], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["library"]).is_relative_to(place), f"the copy was not used: {answer['library']}"
    return answer["results"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_planted_bug_is_noticed(mutation, tmp_path):
    target = copied(tmp_path) / mutation.file
    text = target.read_text()
    assert text.count(mutation.old) == 1, (
        f"{mutation.file} holds {mutation.old!r} {text.count(mutation.old)} times; bring the patch up to date"
    )
    target.write_text(text.replace(mutation.old, mutation.new))
    ((status, reason),) = run(tmp_path, mutation)
    assert status == "broken", f"{mutation.promise} on {mutation.case} is {status}: {reason}"


def test_without_a_bug_all_are_kept(tmp_path):
    copied(tmp_path)
    for mutation, (status, reason) in zip(MUTATIONS, run(tmp_path, *MUTATIONS), strict=True):
        assert status == "kept", f"{mutation.promise} on {mutation.case} is {status}: {reason}"


def test_there_are_enough():
    assert len(MUTATIONS) >= 16
    assert len({m.promise for m in MUTATIONS}) >= 12
