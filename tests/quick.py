"""Print the tests that `make quick M=name` runs: the contract, and the files of the mixer's family."""

from __future__ import annotations

import sys
from pathlib import Path

from tokenmix import MIXERS, build_mixer

HERE = Path(__file__).parent


def files(name: str) -> list[str]:
    """Return the contract's file, and those named after the mixer's module or its family."""
    stem = MIXERS[name].__module__.split(".")[-1]
    named = {HERE / f"test_{s}.py" for s in (name, stem, stem.split("_")[0])}
    return [str(f.relative_to(Path.cwd())) for f in (HERE / "test_contract.py", *sorted(named)) if f.is_file()]


if __name__ == "__main__":
    name = sys.argv[1]
    if name not in MIXERS:
        build_mixer(name, 8)  # raises an error with the nearest names
    print(*files(name))
    print("tests/test_public_names.py::test_the_stub_is_that_of_the_table")
    print(
        f"tests/test_docs.py::test_mixer_has_its_row_and_page[{name}]",
        f"tests/test_layering.py::test_each_mixer_has_its_parts[{name}]",
    )
