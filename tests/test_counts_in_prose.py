"""Counts of mixers and verbs in the documentation are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenmix import MIXERS
from tokenmix.lab.cli.verbs import VERBS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
COUNTS = {
    "mixers": (len(MIXERS), r"holds (\d+) of them|all (\d+) mixers|the (\d+) mixers|(\d+) 种混合器"),
    "verbs": (len(VERBS), r"(\d+) verbs|(\d+) 个命令"),
}


@pytest.mark.parametrize("what", COUNTS)
def test_a_count_in_prose_is_that_of_the_code(what):
    count, pattern = COUNTS[what]
    found = {
        (page.name, match[0]): int(next(number for number in match.groups() if number))
        for page in PAGES
        for match in re.finditer(pattern, page.read_text(encoding="utf-8"))
    }
    assert {where: number for where, number in found.items() if number != count} == {}
    assert what != "mixers" or {page for page, _ in found} >= {"README.md", "README.zh.md"}
