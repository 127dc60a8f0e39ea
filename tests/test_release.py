"""Test that one file holds the version, and that the changelog names it and every break of a public name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import check_api
import tokenmix
from tokenmix.system.deprecation import warn_deprecated

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RELEASES = re.findall(r"^## (\S+)(?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def in_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in version.split("."))


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == check_api.VERSION
    assert tokenmix.__version__ in (ROOT / check_api.VERSION).read_text()
    others = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.toml"),
        *ROOT.glob("*.yml"),
        *ROOT.glob("*.cff"),
        *ROOT.rglob("docs/*.md"),
    ]
    found = [
        file.name
        for file in others
        if re.search(rf"(?<![\d.]){re.escape(tokenmix.__version__)}(?![\d.])", file.read_text())
    ]
    assert set(found) <= {"CHANGELOG.md", "LOG.md"}


def test_the_changelog_names_the_version_and_its_day():
    assert RELEASES[0] == ("Unreleased", "")
    versions = [in_numbers(version) for version, _ in RELEASES[1:]]
    assert versions == sorted(set(versions), reverse=True)
    assert versions[0] == in_numbers(tokenmix.__version__)
    days = [day for _, day in RELEASES[1:]]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", day) for day in days)
    assert days == sorted(days, reverse=True)


def test_the_oldest_versions_are_those_that_are_allowed():
    extras = PROJECT["project"]["optional-dependencies"]
    allowed = dict(
        re.match(r"([\w-]+)>=([\d.]+)", line).groups()
        for line in PROJECT["project"]["dependencies"] + extras["hf"] + extras["vision"]
        if ">=" in line
    )
    oldest = dict(
        line.split("==") for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if "==" in line
    )
    for name in ("torch", "transformers", "timm"):
        assert in_numbers(oldest[name])[: len(in_numbers(allowed[name]))] == in_numbers(allowed[name]), name


def old_function():
    warn_deprecated("tokenmix.old_function", "tokenmix.new_function", removed_in="9.9")


def test_a_deprecated_name_warns_its_caller_in_one_line():
    with pytest.warns(DeprecationWarning, match="old_function is deprecated") as told:
        old_function()
    assert [w.filename for w in told] == [__file__]
    assert str(told[0].message) == (
        "tokenmix.old_function is deprecated and will be removed in tokenmix 9.9; use tokenmix.new_function."
    )


def test_nothing_deprecated_outlives_its_version():
    source = "\n".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    for version in re.findall(r'removed_in="([\d.]+)"', source):
        assert in_numbers(version) > in_numbers(tokenmix.__version__)


def package(folder: Path, source: str, changes: str = "") -> Path:
    """A checkout whose package has one module, of which ``f`` and ``C`` are public."""
    (folder / "src/tokenmix").mkdir(parents=True)
    (folder / "docs/reference").mkdir(parents=True)
    (folder / "src/tokenmix/__init__.py").write_text('from .forms import C, f\n\n__all__ = ["C", "f"]\n')
    (folder / "src/tokenmix/forms.py").write_text(source)
    (folder / "docs/reference/api.md").write_text("::: tokenmix.forms.g\n")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## Unreleased\n\n{changes}\n\n## 0.1.0\n\n- `f`, `C`\n")
    return folder


BEFORE = """
def f(x, scale=1.0): ...
def g(x): ...
def hidden(x): ...
class C:
    def cost(self, T): ...
    def _private(self): ...
"""


@pytest.mark.parametrize(
    ("old", "new", "changes", "breaks"),
    [
        ("", "", "", 0),
        ("def hidden(x): ...", "", "", 0),
        ("def _private(self)", "def _other(self)", "", 0),
        ("def f(x, scale=1.0)", "def f(x, scale=1.0, more=None)", "", 0),
        ("def f(x, scale=1.0)", "def f(x)", "", 1),
        ("def f(x, scale=1.0)", "def f(x)", "- `f(scale=)` is gone.", 0),
        ("def g(x): ...", "", "", 1),
        ("def cost(self, T)", "def price(self, T)", "- `f`", 1),
        ("def cost(self, T)", "def price(self, T)", "- `C.price` for `C.cost`", 0),
    ],
)
def test_changes_of_public_names_are_found_and_announced(old, new, changes, breaks, tmp_path):
    before = package(tmp_path / "before", BEFORE)
    after = package(tmp_path / "after", BEFORE.replace(old, new) if old else BEFORE, changes)
    assert len(list(check_api.find_breaks(before, after))) == breaks


def test_a_clone_without_the_last_release_skips_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.check_api", "no-such-release"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout == "check_api: skipped, this clone does not hold no-such-release\n"
