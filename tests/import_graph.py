"""The imports of the library as a graph between files and between folders, and the imports it should not have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

Graph = dict[str, set[str]]


class Imports:
    """What each file of a package imports from others of it; files are named by their path in the package."""

    def __init__(self, source: Path):
        self.source = source
        self.files = {str(p.relative_to(source)) for p in source.rglob("*.py")}
        self.found = {file: list(self._read(file)) for file in sorted(self.files)}

    def _read(self, file: str) -> Iterator[tuple[str, str]]:
        """Yield (file imported from, name imported) of every import statement, at any depth."""
        here = Path(file).parent.parts
        for node in nodes(self.source / file):
            if isinstance(node, ast.Import):
                named = [(alias.name.split("."), "") for alias in node.names]
                ours = [(tuple(parts[1:]), name) for parts, name in named if parts[0] == self.source.name]
            elif isinstance(node, ast.ImportFrom):
                module = tuple(part for part in (node.module or "").split(".") if part)
                if not node.level and module[:1] != (self.source.name,):
                    continue
                base = (*here[: len(here) - node.level + 1], *module) if node.level else module[1:]
                ours = [(base, alias.name) for alias in node.names]
            else:
                continue
            for base, name in ours:
                target = self._file((*base, name)) or self._file(base)
                if target is not None and target != file:
                    yield target, name

    def _file(self, parts: tuple[str, ...]) -> str | None:
        stem = "/".join(parts)
        return next((f for f in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")) if f in self.files), None)

    def between_files(self) -> Graph:
        """Map each file to the files it imports."""
        return {file: {target for target, _ in found} for file, found in self.found.items()}

    def between_folders(self) -> Graph:
        """Map each folder to the folders it imports; a file at the root of the package counts as a folder."""
        graph: Graph = {}
        for file, targets in self.between_files().items():
            graph.setdefault(room(file), set()).update(room(t) for t in targets)
        return {name: targets - {name} for name, targets in graph.items()}

    def private(self) -> list[str]:
        """Return the imports across folders of a name, or from a file, that begins with one underscore."""
        found = []
        for file, targets in self.found.items():
            for target, name in targets:
                hidden = [
                    part
                    for part in (*Path(target).with_suffix("").parts, name)
                    if part.startswith("_") and not part.startswith("__")
                ]
                if hidden and Path(target).parent != Path(file).parent:
                    found.append(f"{file} imports {name} from {target}")
        return found

    def root_modules(self) -> list[str]:
        """Return the files at the root besides the package's own, its entry point and its errors."""
        return sorted(f for f in self.files if "/" not in f and f not in ("__init__.py", "__main__.py", "errors.py"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def room(file: str) -> str:
    """Return the first folder of a path, in the laboratory the first two, or the name of a file at the root."""
    parts = Path(file).parts
    many = 2 if parts[0] == "lab" and len(parts) > 2 else 1
    return "/".join(parts[:many]).removesuffix(".py")


def circles(graph: Graph) -> list[set[str]]:
    """Return the groups of nodes that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for target in graph.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    reach = {node: reached(node) for node in graph}
    groups = [
        {other for other in reach[node] if node in reach.get(other, ())} | {node}
        for node in graph
        if node in reach[node]
    ]
    return [group for i, group in enumerate(groups) if group not in groups[:i]]


def height(graph: Graph) -> int:
    """Return the number of nodes on the longest path of a graph without cycles."""
    levels: dict[str, int] = {}
    for node in TopologicalSorter(graph).static_order():
        levels[node] = 1 + max((levels[target] for target in graph.get(node, ())), default=0)
    return max(levels.values())
