"""The tests that `make quick M=name` runs: which files, and which of their cases are about that mixer.

The contract and the files of the mixer's family are run as a whole; of the files that try every mixer, this one's cases
and the tests of the tables it is in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cases import CASES
from suites import is_more, is_slow
from tokenmix import MIXERS
from tokenmix.mixers.facts import page_stem

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
    "test_states.py": (),
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
    "test_vision_pictures.py": "pictures of ViTs",
}
"""Other files of `make test` that run over mixers or cases, with the reason that `make quick` leaves them out."""


def family(name: str) -> set[str]:
    """Return the names that a mixer's test file and page may have: its own, its module's, page's and family's."""
    stem = MIXERS[name].__module__.split(".")[-1]
    return {name, stem, page_stem(MIXERS[name]), stem.split("_")[0]}


def is_read(name: str, file: str) -> bool:
    """Return whether a test file is the contract's, of the mixer's module or family, or one of all mixers."""
    return file == "test_contract.py" or file in TABLES or file in {f"test_{stem}.py" for stem in family(name)}


def is_about(name: str, file: str, test: str, params: dict[str, Any]) -> bool:
    """Return whether a test is run for a mixer: of files that try every mixer, those of `make test` by parameters."""
    if file not in TABLES or test in TABLES[file] or file in {f"test_{stem}.py" for stem in family(name)}:
        return True
    if is_more(file, test, params) or is_slow(file, test, params):
        return False
    of = {name, *(case for case, (mixer, _) in CASES.items() if mixer == name)}
    stems = {p.stem for p in params.values() if isinstance(p, Path)}
    return any(isinstance(p, str) and p in of for p in params.values()) or bool(stems & family(name))
