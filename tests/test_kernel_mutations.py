"""Test that each bug of kernel_mutations.py is noticed by the check it names.

Bugs are planted in the C source and compiled; a library without bugs passes every check.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import forked
from kernel_mutations import BUGS, CHECKS, Bug
from tokenmix.kernels.cpu import build

ISA = "base"
QUICKLY = ["-O1", "-w", "-DTM_INLINE=static __attribute__((noinline))"]  # half a second to compile


def outcomes(place: Path, bugs: list[Bug], *names: str) -> list[str]:
    """What the checks say of a library compiled from sources with these bugs, in a fresh process."""
    sources = Path(shutil.copytree(build.SOURCES, place / "src"))
    for bug in bugs:
        forked.plant(sources / bug.file, bug.old, bug.new, bug.times)
    # The kernel at hand is enough; by those of aft_simple.c the instruction set is known.
    own = {bug.file for bug in bugs or BUGS} - {"tm.h"} | {"aft_simple.c"}
    own |= {"aft_forget.c"} if "aft_pairs.c" in own else set()  # whose scan it uses
    lines = (sources / "kernels.c").read_text().splitlines(keepends=True)
    (sources / "kernels.c").write_text(
        "".join(line for line in lines if line.split('"')[1:2] and line.split('"')[1] in own)
    )
    library = build.build(place / "library.so", sources=sources, only=ISA, extra=QUICKLY)
    done = forked.run("kernel_mutations", names, TOKENMIX_LIBRARY=str(library), TOKENMIX_ISA=ISA)
    assert done.status == 0, done.printed[-2000:]
    answer = json.loads(done.printed.splitlines()[-1])
    assert answer["library"] == str(library)
    return answer["results"]


@pytest.mark.parametrize(
    "bug", [pytest.param(b, marks=[] if b.quick else [pytest.mark.slow], id=b.name.replace(" ", "-")) for b in BUGS]
)
def test_planted_bug_is_noticed(bug, tmp_path):
    (said,) = outcomes(tmp_path, [bug], bug.check)
    assert said != "kept", f"{bug.check} does not notice that {bug.name}"


def test_without_a_bug_all_is_kept(tmp_path):
    names = sorted({bug.check for bug in BUGS} | set(CHECKS))
    assert dict(zip(names, outcomes(tmp_path, [], *names), strict=True)) == dict.fromkeys(names, "kept")


def test_the_table_is_sound():
    assert len(BUGS) >= 25
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert all((build.SOURCES / bug.file).is_file() for bug in BUGS)
