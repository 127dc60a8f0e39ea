"""Hybrids in a process of their own, where transformers takes its functions from the package ``kernels``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers comes with the extra hf")
pytest.importorskip("kernels", reason="the package kernels comes with the group dev")
HERE = Path(__file__).parent


def test_hybrids_are_right_through_the_door_of_transformers_and_beside_it():
    """The cases of the file beside this one, and those of ``cpu_kernels`` that call every family."""
    files = [str(HERE / name) for name in ("hub_door_cases.py", "test_kernels_hybrids.py")]
    some = "hub_door or logits_and_gradients or generated or keeps_the_limit or each_way or report"
    told = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-k", some, *files]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "HF_HUB_OFFLINE"))}
    found = subprocess.run(told, env=env, cwd=HERE.parent, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
    assert " passed" in found.stdout
    assert "skipped" not in found.stdout
