"""Print the tests that `make quick M=name` runs, and say which of their cases are about that mixer.

The contract and the files of the mixer's family are run as a whole; of the files that try every mixer, this one's cases
and the tests of the tables it is in.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cases import CASES
from suites import is_more, is_slow
from tokenmix import MIXERS, build_mixer

HERE = Path(__file__).parent
TABLES: dict[str, tuple[str, ...]] = {
    "test_adapted.py": (),
    "test_bench_verb.py": (),
    "test_cli.py": ("test_doctor", "test_list", "test_list_cost"),
    "test_convert.py": (),
    "test_cost.py": (),
    "test_docs.py": ("test_deviations_name_tests_that_exist", "test_the_table_in_the_readme_is_that_of_the_classes"),
    "test_docs_hooks.py": ("test_the_reference_lists_every_mixer_form_and_equation",),
    "test_effective_attention.py": (),
    "test_explain_families.py": (),
    "test_generation_refusals.py": (),
    "test_layering.py": (
        "test_facts_about_mixers_live_in_their_classes",
        "test_functions_keep_the_limits_of_contributing",
    ),
    "test_lm_mixers.py": (),
    "test_positions.py": (),
    "test_public_names.py": ("test_the_core_mixers_are_classes_of_the_package",),
    "test_surgery.py": (),
    "test_train.py": (),
    "test_vit.py": (),
}
"""Files that try every mixer -> their tests of tables, which a new mixer can break too."""
LATER = {
    "test_contract_backends.py": "the C kernels of those that have one",
    "test_mae.py": "as in a ViT",
    "test_pyramid.py": "as in a ViT",
    "test_refused.py": "named cases",
    "test_segments.py": "mixers that state segments, which are promises of the contract too",
    "test_shells.py": "as in a ViT",
}
"""Other files of `make test` that run over mixers or cases, with the reason that `make quick` leaves them out."""


def family(name: str) -> set[str]:
    """Return the names that a mixer's test file and page may have: its own, its module's and its family's."""
    stem = MIXERS[name].__module__.split(".")[-1]
    return {name, stem, stem.split("_")[0]}


def files(name: str) -> list[str]:
    """Return the contract's file, those named after the mixer's module or its family, and those of all mixers."""
    own = [HERE / f"test_{s}.py" for s in sorted(family(name))]
    found = dict.fromkeys([HERE / "test_contract.py", *own, *(HERE / file for file in TABLES)])
    return [str(f.relative_to(Path.cwd())) for f in found if f.is_file()]


def is_about(name: str, file: str, test: str, params: dict[str, Any]) -> bool:
    """Return whether a test is run for a mixer: of files that try every mixer, those of `make test` by parameters."""
    if file not in TABLES or test in TABLES[file] or file.removesuffix(".py").removeprefix("test_") in family(name):
        return True
    if is_more(file, test, params) or is_slow(file, test, params):
        return False
    of = {name, *(case for case, (mixer, _) in CASES.items() if mixer == name)}
    stems = {p.stem for p in params.values() if isinstance(p, Path)}
    return any(isinstance(p, str) and p in of for p in params.values()) or bool(stems & family(name))


if __name__ == "__main__":
    name = sys.argv[1]
    if name not in MIXERS:
        build_mixer(name, 8)  # raises an error with the nearest names
    print(*files(name))
