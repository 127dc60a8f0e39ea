"""Count what users meet: the verbs of the command line, and the fields of the configs."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "tokenmix"


def verbs() -> list[str]:
    """Return the names of the verbs."""
    from tokenmix.lab.cli.verbs import VERBS

    return list(VERBS)


def config_fields(source: Path = SOURCE) -> dict[str, list[str]]:
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


if __name__ == "__main__":
    counted = config_fields()
    print(f"{len(verbs())} verbs; {sum(map(len, counted.values()))} fields of {len(counted)} configs")
    for config, fields in counted.items():
        print(f"{config} {len(fields)}: {', '.join(fields)}")
