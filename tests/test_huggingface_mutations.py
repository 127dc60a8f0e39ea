"""Test that each bug of huggingface_checks.py is noticed by the check it names.

Bugs are planted in a copy of the library; test_huggingface.py shows that all checks hold without them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from huggingface_checks import BUGS, CHECKS, KINDS

HERE = Path(__file__).parent
LIBRARY = HERE.parent / "src" / "tokenmix"


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """What the checks said, each in a process of its own."""
    paths = [str(HERE), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TOKENMIX_NO_KERNELS": "1",
    }
    asked = [sys.executable, "-W", "ignore", str(HERE / "huggingface_checks.py"), str(LIBRARY)]
    done = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name.replace(" ", "-"))
def test_planted_bug_is_noticed(bug, verdicts):
    assert verdicts[bug.name].startswith("broken"), f"{bug.check} on {bug.kind} says: {verdicts[bug.name]}"


def test_the_table_is_sound():
    assert {bug.check for bug in BUGS} <= set(CHECKS)
    assert {bug.kind for bug in BUGS} <= set(KINDS)
    assert len({bug.name for bug in BUGS}) == len(BUGS)
