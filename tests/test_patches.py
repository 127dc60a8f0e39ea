"""Test that each planted bug still finds the text it replaces, whatever suite notices the bug itself.

The bugs are planted by `make test-more` alone; a patch that a change of the library left behind shows here, in
`make test`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import huggingface_checks
import kernel_mutations
import mutations
import test_planted_bugs
import test_sanitizers
from tokenmix.kernels.cpu import build

LIBRARY = Path(__file__).parent.parent / "src" / "tokenmix"


def patches() -> Iterator[tuple[str, Path, str, int]]:
    """The name of each bug, the file it is planted in, the text it replaces, and how often that must occur."""
    for bug in (*mutations.MUTATIONS, *huggingface_checks.BUGS, *test_planted_bugs.BUGS):
        yield bug.name, LIBRARY / bug.file, bug.old, 1
    for bug in kernel_mutations.BUGS:
        yield bug.name, build.SOURCES / bug.file, bug.old, bug.times
    for name, (_, file, old, _) in test_sanitizers.PLANTED.items():
        yield name, build.SOURCES / file, old, 1


@pytest.mark.parametrize(("name", "file", "old", "times"), list(patches()), ids=[name for name, *_ in patches()])
def test_the_text_to_replace_is_there(name, file, old, times):
    found = file.read_text().count(old)
    assert found == times, f"{name}: {file.name} holds {old!r} {found} times, not {times}; bring the patch up to date"
