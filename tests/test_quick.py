"""What `make quick M=name` runs: everything that a new mixer can break, and nothing about the others."""

from __future__ import annotations

import re
from pathlib import Path

import quick
from cases import FIRST
from suites import FILES
from tokenmix import MIXERS

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


def test_the_families_files_come_with_those_of_all(monkeypatch):
    monkeypatch.chdir(HERE.parent)
    found = quick.files("aft_local")
    assert {"tests/test_contract.py", "tests/test_aft.py", "tests/test_cost.py", "tests/test_cli.py"} <= set(found)
    assert len(found) == len(set(found))
    assert all(MIXERS[name] and quick.files(name)[0] == "tests/test_contract.py" for name in ("hydra", "lambda"))
