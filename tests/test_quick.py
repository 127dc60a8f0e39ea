"""What `make quick M=name` runs: everything that a new mixer can break, and nothing about the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import quick
from cases import FIRST
from suites import FILES

HERE = Path(__file__).parent
OVER_ALL = re.compile(
    r"parametrize\([^)]*(?<!\w)(?:MIXERS|CASES|BOTH_WAYS|CAUSAL|forms\(\)|MIXER_PAGES)\b|promised\(\)"
)
"""Parameters that a new mixer adds to."""


def test_every_file_that_tries_all_mixers_is_run_or_left_for_a_reason():
    found = set()
    for file in HERE.glob("test_*.py"):
        text = file.read_text()
        ours = re.search(
            r"^from (?:cases|tokenmix\S*) import .*\b(?:MIXERS|CASES|BOTH_WAYS|forms)\b", text, re.MULTILINE
        )
        own = re.search(r"^(?:MIXERS|CASES)\b.*= ", text, re.MULTILINE)
        if ours and OVER_ALL.search(text) and not own:
            found.add(file.name)
    assert len(found) > 12
    assert found - {*quick.TABLES, *quick.LATER, *FILES, "test_contract.py"} == set()


def test_the_tests_of_tables_exist():
    for file, tests in quick.TABLES.items():
        text = (HERE / file).read_text()
        assert [test for test in tests if f"def {test}(" not in text] == []
    assert all((HERE / file).is_file() for file in quick.LATER)


def test_of_the_others_only_the_tables_are_run():
    about = quick.is_about
    assert about("aft_local", "test_cost.py", "test_flops", {"case": FIRST["aft_local"]})
    assert not about("aft_local", "test_cost.py", "test_flops", {"case": "hydra"})
    assert not about("linear", "test_cost.py", "test_flops", {"case": "multihead_linear"})
    assert about("hydra", "test_cli.py", "test_doctor", {})
    assert not about("hydra", "test_cli.py", "test_version", {})
    assert about("aft_local", "test_docs_hooks.py", "test_every_page_converts", {"a": Path("docs/mixers/aft.md")})
    assert not about("aft_local", "test_docs_hooks.py", "test_every_page_converts", {"a": Path("docs/mixers/hydra.md")})
    assert about("hydra", "test_hydra.py", "test_anything", {})
    assert about("hydra", "test_contract.py", "test_promise", {"a": "hydra", "b": True, "c": "copies"})


def test_the_families_files_come_with_those_of_all():
    read = {file.name for file in HERE.glob("test_*.py") if quick.is_read("aft_local", file.name)}
    assert read == {"test_contract.py", "test_aft.py", "test_aft_local.py", *quick.TABLES} & {
        file.name for file in HERE.glob("test_*.py")
    }


def test_a_name_that_is_no_mixer_runs_no_test():
    env = {**os.environ, "TOKENMIX_QUICK": "hydro"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2"]
    done = subprocess.run(command, env=env, cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 4
    assert done.stderr.strip().startswith(
        "ERROR: TOKENMIX_QUICK: build_mixer: no mixer is called 'hydro'; nearest: hydra"
    )
