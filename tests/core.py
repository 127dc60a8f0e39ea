"""Which test files need torch and pytest alone: those of the library, which `make test-core` runs without any extra."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
TESTS = {
    "test_check.py": ("test_the_error_names_the_line",),
    "test_contract.py": ("test_onnx_is_installed_here",),
    "test_new_mixer.py": ("test_a_new_mixer_keeps_the_contract", "test_its_lines_are_narrow_enough_for_any_name"),
    "test_public_names.py": ("test_every_package_lists_its_public_names",),
}
"""Tests of other files that start the command line or ruff, import every package, or ask for an extra."""
ALLOWED = {"torch", "pytest", "tokenmix"} | sys.stdlib_module_names


@cache
def needs(file: Path) -> frozenset[str]:
    """Return what a test file imports, itself or through other files of this folder, that an extra brings.

    An import inside a function counts. The laboratory is named ``tokenmix.lab``, whatever is imported from it.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            top = module.split(".")[0]
            if module.startswith("tokenmix.lab"):
                found.add("tokenmix.lab")
            elif (helper := HERE / f"{top}.py") != file and helper.is_file():
                found |= needs(helper)
            elif top not in ALLOWED:
                found.add(top)
    return frozenset(found)


@cache
def beyond_torch() -> list[str]:
    """Return the names of the test files that need an extra."""
    return [file.name for file in sorted(HERE.glob("test_*.py")) if needs(file)]


def needs_torch_alone(file: str, test: str) -> bool:
    """Return whether a test of one of the other files needs no extra either."""
    return test not in TESTS.get(file, ())
