"""The map of the library: a file imports only from folders above its own, and each row of MIXERS is complete."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import suites
from cases import CASES
from docs_hooks import with_mixers
from import_graph import Imports, circles, height, nodes, room
from tokenmix import MIXERS, contrib, functional, reference
from tokenmix.mixers.facts import page_stem
from tokenmix.system.collection import collection_paused

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "tokenmix"
LIBRARY = [
    "errors",
    "types",
    "system",
    "reference",
    "kernels",
    "functional",
    "positions",
    "mixers",
    "contrib",
    "models",
    "parallel",
    "export",
    "hosts",
    "testing",
]
LABORATORY = ["data", "train", "recipes", "report", "explain", "sweep", "papers", "hub", "anatomy", "bench", "advise"]
LABORATORY += ["demo", "cli"]
ORDER = LIBRARY + [f"lab/{name}" for name in LABORATORY]
FREE = {"lab/cli", "__main__"}  # entry points, which import what they need
OUTSIDE_REFERENCE = {"testing", "lab/papers"}  # only the contract suite and the claims of papers may import it


FILES = sorted(SOURCE.rglob("*.py"))
MIXER_FILES = [path for path in FILES if path.parent.name in ("mixers", "contrib")]


@functools.cache
def imports() -> Imports:
    """Read the imports of the library, which takes seconds."""
    return Imports(SOURCE)


def imported(path: Path) -> set[str]:
    """The parts of tokenmix a file imports."""
    return {room(target) for target, _ in imports().found[str(path.relative_to(SOURCE))]} & set(ORDER)


def test_imports_go_up():
    wrong = []
    for path in FILES:
        part = room(str(path.relative_to(SOURCE)))
        if part in ORDER and part not in FREE:
            below = imported(path) - set(ORDER[: ORDER.index(part) + 1])
            wrong += [f"{path} imports {name}, which lies below {part}" for name in below]
        if part not in OUTSIDE_REFERENCE | {"reference"} and "reference" in imported(path):
            wrong.append(f"{path}: library code never imports the reference")
    assert wrong == []


def test_the_library_never_imports_the_laboratory():
    """Hold the boundary, also for imports inside functions; only ``python -m tokenmix`` enters the laboratory."""
    found = [
        f"{file} imports {target}"
        for file, targets in imports().between_files().items()
        for target in targets
        if target.startswith("lab/") and not file.startswith("lab/") and file != "__main__.py"
    ]
    assert found == []


def test_the_shape_of_the_house():
    """Check the shape of the house, and print the figures.

    No circle of files, no private name taken from another folder, no module at the root, and few levels.
    """
    found = circles(imports().between_files())
    figures = {
        "circles": found,
        "private imports across folders": imports().private(),
        "root modules": imports().root_modules(),
    }
    rooms = imports().between_folders()
    halves = {"library": set(LIBRARY), "laboratory": set(ORDER) - set(LIBRARY)}
    graphs = {name: {r: rooms[r] & half for r in half} for name, half in halves.items()}
    levels = {name: height(graph) for name, graph in graphs.items()}
    arrows = sum(map(len, graphs["library"].values()))
    said = re.search(r"at most (\d+) levels of folders, and (\d+) arrows", (ROOT / "CONTRIBUTING.md").read_text())
    print(", ".join(f"{name} {len(those)}" for name, those in figures.items()), f"levels {levels}, arrows {arrows}")
    assert figures == dict.fromkeys(figures, [])
    assert max(levels.values()) <= int(said[1])
    assert arrows <= int(said[2])


def test_a_circle_and_a_private_import_are_noticed(tmp_path):
    package = tmp_path / "tokenmix"
    for name, text in {
        "a/x.py": "from ..b.y import _hidden",
        "b/y.py": "from .z import f",
        "b/z.py": "def g():\n    from . import y",
        "loose.py": "",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text + "\n")
    (package / "__init__.py").write_text("from .a import x\n")
    found = Imports(package)
    assert circles(found.between_files()) == [{"b/y.py", "b/z.py"}]
    assert found.private() == ["a/x.py imports _hidden from b/y.py"]
    assert found.root_modules() == ["loose.py"]
    assert height(found.between_folders()) == 3


@pytest.mark.parametrize("name", MIXERS)
def test_each_mixer_has_its_parts(name):
    stem = page_stem(MIXERS[name])
    family = stem.split("_")[0]
    form = MIXERS[name].facts.functional_form()
    assert form is getattr(contrib, form.__name__, None) or form is getattr(functional, form.__name__), "a public form"
    assert callable(getattr(reference, form.__name__)), "a reference"
    assert name in {mixer for mixer, _ in CASES.values()}, "a case"
    assert any((ROOT / "docs" / "mixers" / f"{page}.md").is_file() for page in (stem, family)), (
        f"a page docs/mixers/{family}.md"
    )
    assert MIXERS[name].__doc__, "a docstring"
    assert all(MIXERS[name].facts.about[:4]), "about: paper, kind, time and space"
    assert MIXERS[name].facts.about.idea or MIXERS[name].facts.about.tier == "extended", "about: idea"


def test_the_core_needs_torch_only():
    """With every extra made impossible to import, the package imports and a mixer runs."""
    blocked = ["numpy", "tyro", "rich", "yaml", "safetensors", "matplotlib", "jinja2", "jaxtyping"]
    code = f"""
import sys
sys.modules.update({{name: None for name in {blocked}}})
import torch, tokenmix
mixer = tokenmix.build_mixer("aft_local", 8, causal=True, max_len=16, window=4)
y, state = mixer.extend(torch.ones(1, 5, 8), mixer.init_state(1))
assert torch.allclose(y, mixer(torch.ones(1, 5, 8)), atol=1e-6)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_reports_and_measurements_never_import_the_trainer():
    for folder in ("report", "bench"):
        for file in (SOURCE / "lab" / folder).glob("*.py"):
            assert "lab/train" not in imported(file), file


@pytest.mark.parametrize("name", MIXERS)
def test_the_folder_of_a_mixer_is_that_of_its_tier(name):
    cls = MIXERS[name]
    assert cls.__module__.split(".")[1] == {"core": "mixers", "extended": "contrib"}[cls.facts.about.tier]


@pytest.mark.parametrize("path", MIXER_FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_no_mixer_takes_helpers_from_the_module_of_another(path):
    """What two families share has a module of its own, which defines no mixer."""
    homes = {cls.__module__.split(".")[-1] for cls in MIXERS.values()}
    if path.stem not in ("__init__", "table"):
        taken = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.level == 1
        }
        assert taken & homes == set(), f"{path.stem} imports from {', '.join(sorted(taken & homes))}"


def limits() -> dict[str, int]:
    """The limits that CONTRIBUTING.md names, in lines."""
    form = r"Functions have at most (\d+) lines \(in a file of Triton kernels (\d+)\)"
    said = re.search(form, (ROOT / "CONTRIBUTING.md").read_text())
    return dict(zip(("function", "triton function"), map(int, said.groups()), strict=True))


def test_functions_keep_the_limits_of_contributing():
    limit, wrong = limits(), []
    for path in FILES:
        triton = path.parent.name == "triton"
        functions = [n for n in nodes(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        longest = limit["triton function" if triton else "function"]
        wrong += [f"{path}: {f.name}" for f in functions if f.end_lineno - f.lineno + 1 > longest]
    assert wrong == []


def test_the_map_in_the_design_is_that_of_the_code():
    block = (ROOT / "docs" / "design.md").read_text().split("```text\nsrc/tokenmix/\n")[1].split("```")[0]
    said = re.findall(r"^  ((?:lab/)?[a-z]+)(?:/|\.py)", block, flags=re.MULTILINE)
    assert said == ORDER
    folders = {p for where in (SOURCE, SOURCE / "lab") for p in where.iterdir() if p.is_dir()}
    names = {str(p.relative_to(SOURCE)) for p in folders} - {"lab", "__pycache__", "lab/__pycache__"}
    assert names == {n for n in said if (SOURCE / n).is_dir()}


def test_the_navigation_names_every_page_and_section_once():
    def walk(entries):
        for entry in entries:
            name, what = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
            yield from ((name, None), *walk(what)) if isinstance(what, list) else ((name, what),)

    nav = re.search(r"^nav:\n(?:[ ].*\n)+", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)[0]
    entries = list(walk(with_mixers(yaml.safe_load(nav)["nav"])))
    pages, sections = [page for _, page in entries if page], [name for name, page in entries if page is None]
    assert sorted(pages) == sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))
    assert len(sections) == len(set(sections))


OTHER_WORDS = {
    "lab/advise/text.py",
    "hosts/surgery/sites.py",
    "hosts/rotary.py",
    "positions/rotary.py",
    "lab/train/config.py",
} | {"testing/skeletons/__init__.py"}
"""List files in which "attention" or "linear" is no mixer.

A key of a JSON report, a part of a class's name, a rule of rotary scaling, a schedule, a kind of mixer.
"""
BY_NAME = ("mixers/", "contrib/", "reference/", "functional/", "kernels/", "lab/recipes/", "models/named", "lab/demo")
"""Where mixers may be told apart by name: their own rooms, and tables of models to train."""


def named(path: Path) -> list[str]:
    """Names of mixers that a file branches on or keys a table by."""

    def texts(nodes):
        return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]

    every, found = nodes(path), []
    for node in every:
        if isinstance(node, ast.Dict):
            found += texts(k for k in node.keys if k is not None)
        elif isinstance(node, ast.Set):
            found += texts(node.elts)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            found += texts(
                [*sides, *(e for side in sides if isinstance(side, ast.Tuple | ast.List | ast.Set) for e in side.elts)]
            )
        elif isinstance(node, ast.MatchValue):
            found += texts([node.value])
    for node in every[0].body:  # a constant that lists several
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple | ast.List)
            and len(set(texts(node.value.elts)) & set(MIXERS)) > 1
        ):
            found += texts(node.value.elts)
    words = {"attention", "linear"} if str(path.relative_to(SOURCE)) in OTHER_WORDS else set()
    return sorted(set(found) & set(MIXERS) - words)


def test_facts_about_mixers_live_in_their_classes():
    """No table or branch is keyed by a mixer's name: the class states the fact (mixers/facts.py)."""
    files = [path for path in FILES if not str(path.relative_to(SOURCE)).startswith(BY_NAME)]
    assert {str(path): found for path in files if (found := named(path))} == {}


def test_a_table_by_name_is_noticed():
    planted = SOURCE.parent / "tokenmix" / "planted.py"
    code = 'A = {"hydra": 1}\nB = {"aft_full"}\nC = ("aft_simple", "local")\n\n'
    code += 'def f(n):\n    return n == "rfa" or n in ("polynl",)\n'
    real = Path.read_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self, *a: code if self == planted else real(self, *a))
        assert named(planted) == ["aft_full", "aft_simple", "hydra", "local", "polynl", "rfa"]


def test_the_table_of_suites_names_tests_that_exist():
    tests = Path(__file__).parent
    assert all((tests / file).is_file() for file in {**suites.FILES, **suites.TESTS})
    slow = {file: {test for name, test in suites.SLOW if name == file} for file, _ in suites.SLOW}
    for file, names in (*suites.TESTS.items(), *slow.items()):
        known = {n.name for n in ast.walk(ast.parse((tests / file).read_text())) if isinstance(n, ast.FunctionDef)}
        assert set(names) <= known, file
    assert not set(suites.FILES) & set(suites.TESTS)


def test_old_names_say_where_a_module_is():
    """Old import paths answer in one line, whichever way they are written."""
    for line in ("import tokenmix.train", "from tokenmix.train import train", "from tokenmix import train"):
        done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
        assert done.returncode == 1
        assert "tokenmix.lab.train" in done.stderr.splitlines()[-1], done.stderr


def test_the_import_leaves_garbage_collection_as_it_was():
    for before in (True, False):
        (gc.enable if before else gc.disable)()
        try:
            with collection_paused():
                assert not gc.isenabled()
            assert gc.isenabled() is before
        finally:
            gc.enable()
