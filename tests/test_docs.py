"""Test that every example in the documentation runs.

Every public name and mixer has its place in it, every command it names exists.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import tokenmix
from tokenmix.lab.report.taxonomy import MARK, readme_table, taxonomy, update_readme

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_EXAMPLES = [p for p in PAGES if "```python\n" in p.read_text() and not p.name.endswith(".zh.md")]
"""Translations have the same blocks as their pages (tests/test_walk.py), so these run once."""


def examples(page: Path) -> list[doctest.DocTest]:
    """The python blocks of a page as one test: later blocks use what earlier ones made."""
    text = page.read_text()
    blocks = "".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    return [doctest.DocTestParser().get_doctest(blocks, {}, page.name, str(page), 0)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples_run(page):
    # Pages import transformers and timm themselves, which fail beside a torchvision built for another torch.
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    failures: list[str] = []
    for test in examples(page):
        assert test.examples, "a python block holds no >>> example"
        runner.run(test, out=failures.append)
    assert not runner.failures, "".join(failures)


def test_a_wrong_example_is_caught():
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0), out=lambda _: None)
    assert runner.failures == 1


CLASSES = list(tokenmix.MIXERS.values())  # the page of classes of mixers is made from the table
PUBLIC = [n for n in tokenmix.__all__ if not n.startswith("__") and getattr(tokenmix, n) not in CLASSES]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_in_the_reference(name):
    assert hasattr(tokenmix, name)
    assert re.search(
        rf"^(::: |### )tokenmix\.{name}$", (ROOT / "docs/reference/api.md").read_text(), flags=re.MULTILINE
    )


@pytest.mark.parametrize("name", [n for n, cls in tokenmix.MIXERS.items() if cls.__module__.startswith("tokenmix.")])
def test_mixer_has_its_row_and_page(name):
    row = re.search(rf"^\| \[`{name}`\]\(([\w-]+\.md)\) \|", taxonomy(ROOT / "docs/mixers"), flags=re.MULTILINE)
    assert row, "no page"
    assert name in (ROOT / "docs/mixers" / row[1]).read_text()


def test_the_page_of_mixers_asks_for_their_table():
    assert MARK in (ROOT / "docs/mixers/index.md").read_text()


def test_the_table_in_the_readme_is_that_of_the_classes():
    text = (ROOT / "README.md").read_text()
    assert readme_table() in text, "write it anew: make tables"
    assert update_readme(text.replace("| `hydra` | phi", "| `hydra` | psi")) == text


def test_commands_in_the_documentation_exist():
    from tokenmix.lab.cli.verbs import VERBS

    text = "\n".join(p.read_text() for p in PAGES)
    verb = r"tokenmix ([a-z]+(?:-[a-z]+)*)\b"
    named = set(re.findall(rf"^{verb}", text, flags=re.MULTILINE)) | set(re.findall(rf"`{verb}[^`]*`", text))
    assert named, "the documentation names no command"
    assert named <= set(VERBS)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)`", text)) <= set(targets)


def test_deviations_name_tests_that_exist():
    sources = "\n".join(p.read_text() for p in (ROOT / "tests").glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", "".join(page.read_text() for page in (ROOT / "docs/mixers").glob("*.md"))))
    assert named
    assert {n for n in named if f"def {n}(" not in sources} == set()
