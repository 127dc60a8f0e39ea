"""``__all__`` of every package, Literal types of options, the classes of mixers, what ``F`` is."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest
import torch

import tokenmix
from tokenmix import MIXERS, MixerError, build_mixer, functional
from tokenmix.functional.sums.gates import GATES, Gate
from tokenmix.functional.sums.window import LocalOutside, Outside
from tokenmix.kernels.backend import BACKENDS, Backend
from tokenmix.mixers import CORE

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "tokenmix"
PACKAGES = sorted(str(file.parent.relative_to(SOURCE.parent)).replace("/", ".") for file in SOURCE.rglob("__init__.py"))


def tree_of(package: str) -> ast.Module:
    return ast.parse((SOURCE.parent / package.replace(".", "/") / "__init__.py").read_text())


def imported(tree: ast.Module) -> set[str]:
    """The public names a file imports at its top from our own modules."""
    from_ours = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]
    return {
        alias.asname or alias.name
        for node in from_ours
        for alias in node.names
        if not (alias.asname or alias.name).startswith(("_", "*"))
    }


def used(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def taken_elsewhere() -> dict[str, set[str]]:
    """By package, the names that other files of the library, the tests and the benchmarks import from it."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        here = file.relative_to(SOURCE.parent).parent.parts
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = here[: len(here) - node.level + 1] + tuple((node.module or "").split(".") if node.module else ())
                found[".".join(base)] |= {alias.name for alias in node.names}
    for file in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found[node.module] |= {alias.name for alias in node.names}
    return found


@pytest.fixture(scope="module")
def taken():
    return taken_elsewhere()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_lists_its_public_names(package, taken):
    tree, module = tree_of(package), importlib.import_module(package)
    modules = {p.stem for p in (SOURCE.parent / package.replace(".", "/")).iterdir() if p.suffix == ".py" or p.is_dir()}
    listed = getattr(module, "__all__", None)
    if listed is None:
        assert not imported(tree), f"{package} imports names and has no __all__"
        listed = []
    assert list(listed) == sorted(set(listed))
    assert [name for name in listed if not hasattr(module, name)] == []
    missing = (imported(tree) - used(tree)) | {
        name for name in taken[package] - modules if not name.startswith("_")
    } - {"*"}
    assert missing - set(listed) == set(), f"{package} re-exports names that its __all__ lacks"


def test_types_and_tables_name_the_same_values():
    assert get_args(Gate) == tuple(GATES)
    assert get_args(Backend) == BACKENDS


WORDS = ("zero", "none", "pool", "other")
OUTSIDE = [
    ("aft_local", (torch.zeros(4, 4),), {"window": 2}, {"max_len": 4, "window": 2}, Outside),
    ("aft_conv", (torch.zeros(4, 3),), {}, {"heads": 1, "kernel_size": 3}, Outside),
    ("local", (), {"window": 2, "heads": 1}, {"heads": 1}, LocalOutside),
]


def takes(call, *args, **options) -> bool:
    """Whether a call takes ``outside``; where it does not, the error names a choice."""
    try:
        call(*args, **options)
    except MixerError as refused:
        if "outside" not in str(refused) or "none" not in str(refused):
            raise
        return False
    return True


@pytest.mark.parametrize(("name", "learned", "sizes", "built_with", "type_"), OUTSIDE)
def test_outside_takes_what_its_type_says(name, learned, sizes, built_with, type_):
    form, q = getattr(functional, name), torch.ones(1, 4, 4)
    assert {word for word in WORDS if takes(form, q, q, q, *learned, **sizes, outside=word)} == set(get_args(type_))
    assert {word for word in WORDS if takes(build_mixer, name, 4, **built_with, outside=word)} == set(get_args(type_))


@pytest.mark.parametrize("cls", MIXERS.values())
def test_the_signature_of_a_mixer_is_that_of_its_constructor(cls):
    """`help` and editors showed (*args, **options)."""
    shown = inspect.signature(cls).parameters
    assert list(shown) == list(inspect.signature(cls.__init__).parameters)[1:]
    assert "dim" in shown


def test_the_core_mixers_are_classes_of_the_package():
    for name in CORE:
        assert getattr(tokenmix, MIXERS[name].__name__) is MIXERS[name]
    mixer = tokenmix.AFTLocal(8, window=4, causal=True, max_len=16)
    assert mixer(torch.ones(1, 16, 8)).shape == (1, 16, 8)


SNIPPET = """
from typing import assert_type
from torch import Tensor
from tokenmix import AFTLocal, Mixer, build_mixer
from tokenmix.mixers import Segment, State
x = Tensor()
mixer = AFTLocal(8, window=4, causal=True, max_len=16)
assert_type(mixer, AFTLocal)
assert_type(mixer.forward(x), Tensor)
assert_type(mixer.extend(x, mixer.init_state(1)), tuple[Tensor, State])
assert_type(mixer.segment(x), Segment)
assert_type(build_mixer("hydra", 8, causal=True), Mixer)
AFTLocal(8, window="4")  # type: ignore[arg-type]
AFTLocal(8, windows=4)  # type: ignore[call-arg]
"""


def test_a_type_checker_knows_classes_and_options(tmp_path):
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", file]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT / "src")}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_f_is_torch_nn_functional_and_nothing_else(folder):
    wrong = []
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                wrong += [
                    str(file) for alias in node.names if (alias.name == "torch.nn.functional") != (alias.asname == "F")
                ]
            elif isinstance(node, ast.ImportFrom):
                wrong += [
                    str(file)
                    for alias in node.names
                    if alias.asname == "F" or (node.module == "torch.nn" and alias.name == "functional")
                ]
    assert wrong == []
