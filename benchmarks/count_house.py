"""Count the house: lines, rooms, arrows, levels and circles of both halves, verbs, fields of configs, public names,
functions whose name is one participle or adverb, ``Any`` in annotations.

``python -m benchmarks.count_house [CHECKOUT ...]`` prints a table with a column for each checkout.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BARE = re.compile(r"_?[a-z]+(ed|ing|ly|ught|old|aid|ept|own)")
"""Names of functions that are one participle or adverb, and the few nouns and verbs that end like one."""
OTHERS = re.compile(
    "_?(across|after|again|alike|alone|along|anew|apart|around|away|before|behind|below|beside|between|beyond|blind"
    "|broken|built|drawn|found|given|held|honest|inside|itself|later|least|lone|lost|made|met|most|near|now|of|on|once"
    "|over|risen|seen|shrunk|some|spoilt|taken|then|together|under|unlike|upright|within|without|written|wrong)"
)
"""Those that are another participle, an adverb or a preposition."""
sys.path.append(str(ROOT / "tests"))
from import_graph import Graph, Imports, circles, height, nodes  # noqa: E402


def counts(root: Path) -> dict[str, int]:
    """Return the figures of one checkout, by name. A checkout without ``lab/`` is all library."""
    source = root / "src" / "tokenmix"
    imports = Imports(source)
    files = imports.between_files()
    rooms = {name: to for name, to in imports.between_folders().items() if (source / name).is_dir() and name != "lab"}
    lab = {name for name in rooms if name.startswith("lab/")}
    library, laboratory = (_within(rooms, half) for half in (rooms.keys() - lab, lab))
    lines = {file: (source / file).read_text().count("\n") for file in files}
    trees = [ast.parse((source / file).read_text()) for file in files]
    names = [name for tree in trees for name in function_names(tree)]
    return {
        "lines of Python, library": sum(n for file, n in lines.items() if not file.startswith("lab/")),
        "lines of Python, laboratory": sum(n for file, n in lines.items() if file.startswith("lab/")),
        "lines of Python, tests": sum(f.read_text().count("\n") for f in sorted((root / "tests").rglob("*.py"))),
        "files of Python": len(files),
        "rooms, library": len(library),
        "rooms, laboratory": len(laboratory),
        "arrows inside the library": sum(map(len, library.values())),
        "arrows in all": sum(len(to & rooms.keys()) for to in rooms.values()),
        "levels, library": height(library),
        "levels, laboratory": height(laboratory) if laboratory else 0,
        "circles of files": len(circles(files)),
        "verbs": len(verbs(source)),
        "fields of configs": sum(map(len, config_fields(source).values())),
        "public names": sum(map(_public_names, map(source.joinpath, files))),
        "functions and methods": len(names),
        "functions named by a participle": sum(map(bool, map(BARE.fullmatch, names))),
        "functions named by an adverb or the like": sum(map(bool, map(OTHERS.fullmatch, names))),
        "Any in annotations": sum(map(count_any, trees)),
    }


def function_names(tree: ast.Module) -> list[str]:
    """Return the names of all functions and methods of a file, nested ones too."""
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def count_any(tree: ast.Module) -> int:
    """Count ``Any`` in the annotations of arguments, results and variables."""
    annotations = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            annotations.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            annotations.append(node.returns)
    found = [each for annotation in annotations if annotation is not None for each in ast.walk(annotation)]
    return sum(isinstance(each, ast.Name) and each.id == "Any" for each in found)


def _within(rooms: Graph, half: set[str]) -> Graph:
    """Return the arrows between the rooms of one half."""
    return {name: rooms[name] & half for name in half}


def verbs(source: Path) -> list[str]:
    """Return the verbs of the command line: the keys of the table VERBS."""
    (file,) = (f for f in (source / "lab/cli/verbs.py", source / "cli/verbs.py") if f.is_file())
    table = next(
        node.value
        for node in nodes(file)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "VERBS" and isinstance(node.value, ast.Dict)
    )
    return [ast.literal_eval(key) for key in table.keys if key is not None]


def config_fields(source: Path) -> dict[str, list[str]]:
    """Return the fields that each config dataclass adds to those it inherits.

    Configs are the subclasses of ``Json``, the dataclasses whose name ends in Config, and the dataclasses that stand in
    their annotations. Configs of other libraries (``hosts``) are not counted.
    """
    classes = {
        node.name: node
        for file in sorted(source.rglob("*.py"))
        if "hosts" not in file.relative_to(source).parts
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    }
    found = {n for n, c in classes.items() if n.endswith("Config") or "Json" in map(ast.unparse, c.bases)}
    while more := {name for n in found for name in _named(classes[n]) & classes.keys()} - found:
        found |= more
    return {name: [ast.unparse(field.target) for field in _fields(classes[name])] for name in sorted(found)}


def _fields(cls: ast.ClassDef) -> list[ast.AnnAssign]:
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign)]
    return [field for field in fields if not ast.unparse(field.annotation).startswith("ClassVar")]


def _named(cls: ast.ClassDef) -> set[str]:
    annotations = [node for field in _fields(cls) for node in ast.walk(field.annotation)]
    return {node.id for node in annotations if isinstance(node, ast.Name)}


def _public_names(file: Path) -> int:
    """Return how many functions, classes, methods and constants of a file have no leading underscore."""
    found = []
    for node in ast.parse(file.read_text()).body:
        found += _names(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found += [name for each in node.body if isinstance(each, ast.FunctionDef) for name in _names(each)]
    return sum(not name.startswith("_") for name in found)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def main(roots: list[Path]) -> None:
    """Print the table of checkouts."""
    columns = [counts(root) for root in roots]
    print(f"| | {' | '.join(root.resolve().name for root in roots)} |")
    print("|---" * (len(roots) + 1) + "|")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(f'{column[name]:,}' for column in columns)} |")


if __name__ == "__main__":
    main([Path(root) for root in sys.argv[1:]] or [ROOT])
