"""The map of the library: a file imports only from folders above its own, and each row of MIXERS is complete."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from cases import CASES
from tokenmix import MIXERS, functional, reference

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "tokenmix"
ORDER = ["errors", "reference", "kernels", "functional", "positions", "mixers", "models", "data", "train", "recipes", "bench", "report", "hosts"]
ORDER += ["testing", "cli"]
FREE = {"cli", "demo", "__main__"}  # entry points, which import what they need
OUTSIDE_REFERENCE = {"testing"}  # only the contract suite may import the reference


def imported(path: Path) -> set[str]:
    """The parts of tokenmix a file imports."""
    here, parts = path.relative_to(SOURCE).parent.parts, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            names = [*base, *(node.module or "").split(".")] if node.level else (node.module or "").split(".")
            names = [n for n in names if n]
            if node.level or names[:1] == ["tokenmix"]:
                names = names if node.level else names[1:]
                parts |= {names[0]} if names else {a.name for a in node.names}
        elif isinstance(node, ast.Import):
            parts |= {a.name.split(".")[1] for a in node.names if a.name.startswith("tokenmix.")}
    return parts & set(ORDER)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_up(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part in ORDER and part not in FREE:
        allowed = set(ORDER[: ORDER.index(part) + 1])
        assert imported(path) <= allowed, f"{path} imports {imported(path) - allowed}, which lie below {part}"
    if part not in OUTSIDE_REFERENCE | {"reference"}:
        assert "reference" not in imported(path), "library code never imports the reference"


@pytest.mark.parametrize("name", MIXERS)
def test_each_mixer_has_its_parts(name):
    stem = importlib.import_module(MIXERS[name].__module__).__name__.split(".")[-1]
    family = stem.split("_")[0]
    assert callable(getattr(functional, name)), "a functional form"
    assert callable(getattr(reference, name)), "a reference"
    assert name in {mixer for mixer, _ in CASES.values()}, "a case"
    assert any((ROOT / "docs" / "mixers" / f"{page}.md").is_file() for page in (stem, family)), f"a page docs/mixers/{family}.md"
    assert MIXERS[name].__doc__, "a docstring"
