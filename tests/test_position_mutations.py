"""Plant bugs in positions of digits, samplers, loops and tasks of characters; the named test must notice each.

Each is patched into a copy of the library, on which that test runs in a process of its own and must fail by comparison.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
LIBRARY = HERE.parent / "src" / "tokenmix"


class Bug(NamedTuple):
    """Replace ``old`` by ``new`` in one file of the library; ``test`` in ``tests/<suite>.py`` must then fail."""

    name: str
    file: str
    old: str
    new: str
    suite: str
    test: str


BUGS = [
    Bug(
        "the offset of Abacus stays at test time",
        "positions/digits.py",
        "if self.training and self.max_offset > 1:",
        "if self.max_offset > 1:",
        "test_digit_positions",
        "test_offsets_move_digits_in_training_alone",
    ),
    Bug(
        "Abacus moves what is no digit",
        "positions/digits.py",
        "offset if self.separators_move else torch.where(places > 0, offset, 0)",
        "offset",
        "test_digit_positions",
        "test_offsets_move_digits_in_training_alone",
    ),
    Bug(
        "a stream forgets that it is inside a number",
        "models/lm.py",
        "before = run[0] if run else",
        "before = run[0] * 0 if run else",
        "test_digit_positions",
        "test_streams_in_any_cuts_equal_the_whole",
    ),
    Bug(
        "padding counts as a digit",
        "positions/digits.py",
        "counted = valid & ~digit, valid.long().cumsum(1)",
        "counted = valid & ~digit, torch.ones_like(valid).long().cumsum(1)",
        "test_digit_positions",
        "test_places_equal_those_of_a_loop_with_padding_and_any_start",
    ),
    Bug(
        "positions are sampled in evaluation",
        "models/lm.py",
        "if self.training and self.config.sample_positions is not None:",
        "if self.config.sample_positions is not None:",
        "test_digit_positions",
        "test_a_model_samples_in_training_alone_and_tells_its_mixers",
    ),
    Bug(
        "the input is injected before the first pass alone",
        "models/looped.py",
        "return s + x if self.mix is None",
        "return s + x * (s is x) if self.mix is None",
        "test_digit_positions",
        "test_passes_are_the_blocks_stacked",
    ),
    Bug(
        "a stream does not inject",
        "models/trunk.py",
        "self.blocks[n].extend(s if self.loop is None else self.loop.inject(s, x, n), old, **given)",
        "self.blocks[n].extend(s, old, **given)",
        "test_digit_positions",
        "test_streams_in_any_cuts_equal_the_whole",
    ),
    Bug(
        "a sum without its carries",
        "data/characters.py",
        "total = sums[:, column] + carry",
        "total = sums[:, column]",
        "test_characters",
        "test_rows_of_a_size_say_what_is_true",
    ),
    Bug(
        "a sort that is not stable among digits",
        "data/characters.py",
        "order = order.gather(1, key.argsort(dim=1, stable=True))",
        "order = key.argsort(dim=1, stable=True)",
        "test_characters",
        "test_rows_of_a_size_say_what_is_true",
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_noticed(bug, tmp_path):
    library = Path(
        shutil.copytree(LIBRARY, tmp_path / "tokenmix", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    )
    text = (library / bug.file).read_text()
    assert text.count(bug.old) == 1
    (library / bug.file).write_text(text.replace(bug.old, bug.new))
    paths = [str(tmp_path), str(HERE), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"TOKENMIX_NO_KERNELS": "1"}
    asked = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    asked += ["-k", bug.test, str(HERE / f"{bug.suite}.py")]
    done = subprocess.run(asked, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "AssertionError" in done.stdout or "E       assert" in done.stdout, done.stdout[-2000:]
