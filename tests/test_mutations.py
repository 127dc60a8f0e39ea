"""Test that each planted bug of mutations.py is noticed by the promise it names.

The library without bugs keeps those promises. The bugs are in Python, so the C kernels, which would step in, are
switched off; theirs are in kernel_mutations.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import forked
from forked import copied, plant
from mutations import MUTATIONS, Mutation


def run(place: Path, *mutations: Mutation) -> list[tuple[str, str]]:
    """Status and reason of each mutation's promise, in a process that imports the copy."""
    asked = [str(a) for m in mutations for a in (m.case, m.causal, m.promise)]
    done = forked.run("mutations", asked, place, TOKENMIX_NO_KERNELS="1")
    assert done.status == 0, done.printed[-2000:]
    answer = json.loads(done.printed.splitlines()[-1])
    assert Path(answer["library"]).is_relative_to(place), f"the copy was not used: {answer['library']}"
    return answer["results"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_planted_bug_is_noticed(mutation, tmp_path):
    plant(copied(tmp_path) / mutation.file, mutation.old, mutation.new)
    ((status, reason),) = run(tmp_path, mutation)
    assert status == "broken", f"{mutation.promise} on {mutation.case} is {status}: {reason}"


def test_without_a_bug_all_are_kept(tmp_path):
    copied(tmp_path)
    for mutation, (status, reason) in zip(MUTATIONS, run(tmp_path, *MUTATIONS), strict=True):
        assert status == "kept", f"{mutation.promise} on {mutation.case} is {status}: {reason}"


def test_there_are_enough():
    assert len(MUTATIONS) >= 16
    assert len({m.promise for m in MUTATIONS}) >= 12
