"""Summarisation without a download: functions of Python's standard library, and what their docstrings begin with."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .corpora import SKIPPED_FOLDERS

MOST_CHARACTERS = 600  # of a function's body that are read


def docstring_pairs(root: Path | None = None) -> list[tuple[str, str]]:
    """Return (body, first paragraph of the docstring) of all functions, in the order of files.

    The body is what follows the docstring, unparsed, which drops comments; its name and arguments come first. Functions
    without a docstring or a body are left out, and of equal bodies all but the first.

    Args:
        root: folder with Python files; None: the standard library.
    """
    return list(_pairs_of(root or Path(sysconfig.get_paths()["stdlib"])))


@cache
def _pairs_of(root: Path) -> tuple[tuple[str, str], ...]:
    """Parse all files, once: labels, tasks and sweeps ask for the same ones again."""
    seen, pairs = set(), []
    for file in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS & set(file.relative_to(root).parts):
            continue
        for body, said in _functions(file):
            if body not in seen:
                seen.add(body)
                pairs.append((body, said))
    return tuple(pairs)


def _functions(file: Path) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):  # files that are meant to be wrong, for tests
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        said = (ast.get_docstring(node) or "").split("\n\n")[0]
        said = " ".join(said.split())
        body = " ".join(" ".join(ast.unparse(line).split()) for line in node.body[1:])
        if said and body and body != "pass":
            yield f"{node.name}({ast.unparse(node.args)}): {body}"[:MOST_CHARACTERS], said
