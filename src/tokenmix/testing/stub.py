"""Write the stub of ``build_mixer``: one overload for each row of the table, so that editors show each mixer's options.

python -m tokenmix.testing.stub        # writes mixers/by_name.pyi
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections import defaultdict
from pathlib import Path

from .. import mixers
from ..mixers import MIXERS, Mixer

STUB = Path(mixers.__file__).with_name("by_name.pyi")
HEAD = "# `make tables` writes this file from table.py and the constructors of its classes; change those instead.\n\n"
ALWAYS = {"Any": "typing", "Literal": "typing", "overload": "typing", "Mixer": ".base"}
# for mixers that register_mixer adds, and for names that are variables
REST = "@overload\ndef build_mixer(name: str, dim: int, **options: Any) -> Mixer: ...\n"


def stub() -> str:
    """Return the text of the stub. Every list is split, so the formatter keeps its layout at any width."""
    homes = dict(ALWAYS)
    rows = {name: cls for name, cls in MIXERS.items() if cls.__module__.startswith("tokenmix.")}  # not your own
    for cls in rows.values():
        homes |= _homes(cls)
    names = "".join(f'    "{name}",\n' for name in rows)
    overloads = [_overload(name, cls) for name, cls in rows.items()]
    table = f"MixerName = Literal[\n{names}]\n\n"
    return HEAD + _imports(homes) + "\n" + table + "".join(overloads) + REST


def _overload(name: str, cls: type[Mixer]) -> str:
    """Return the signature of ``build_mixer`` for one row, one parameter to a line."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]
    lines = [
        f"{p.name}: {p.annotation}" + ("" if p.default is p.empty else f" = {_written(p.default)}")
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    ]
    listed = "".join(f"    {line},\n" for line in [f'name: Literal["{name}"]', "dim: int", "*", *lines])
    return f"@overload\ndef build_mixer(\n{listed}) -> {cls.__name__}: ...\n"


def _written(default: object) -> str:
    return (
        f'"{default}"'
        if isinstance(default, str)
        else repr(default)
        if default is None or isinstance(default, (bool, int, float))
        else "..."
    )


def _homes(cls: type[Mixer]) -> dict[str, str]:
    """Return the module of the class and of each name its constructor's annotations use, relative to ``mixers``."""
    package, _, stem = cls.__module__.rpartition(".")
    here = f".{stem}" if package == mixers.__name__ else f"..contrib.{stem}"
    known: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(sys.modules[cls.__module__])).body:
        if isinstance(node, ast.ImportFrom):
            known |= {alias.name: "." * node.level + (node.module or "") for alias in node.names}
    annotations = [
        str(p.annotation) for p in inspect.signature(cls.__init__).parameters.values() if p.annotation is not p.empty
    ]
    used = {node.id for text in annotations for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return {cls.__name__: here} | {name: known.get(name, here) for name in used if not hasattr(builtins, name)}


def _imports(homes: dict[str, str]) -> str:
    """Return the import statements in the order the linter wants them."""
    by_module: dict[str, list[str]] = defaultdict(list)
    for name, module in homes.items():
        by_module[module].append(name)
    blocks: dict[int, list[str]] = {0: [], 1: []}
    for module in sorted(by_module, key=lambda module: (-len(module) + len(module.lstrip(".")), module)):
        names = sorted(by_module[module], key=lambda name: (not name.isupper(), name[0].islower(), name))
        listed = names[0] if len(names) == 1 else "(\n" + "".join(f"    {name},\n" for name in names) + ")"
        blocks[module.startswith(".")].append(f"from {module} import {listed}\n")
    return "\n".join("".join(block) for block in blocks.values())


if __name__ == "__main__":
    STUB.write_text(stub())
