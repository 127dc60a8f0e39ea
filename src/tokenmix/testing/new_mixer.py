"""The command ``tokenmix new-mixer``: write the five places of a new mixer into a checkout of the library.

A skeleton keeps the whole contract as written; replace its mathematics step by step.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import subprocess
import sys
from pathlib import Path

from ..errors import MixerError
from ..mixers import MIXERS
from .skeletons import SKELETONS

LONGEST = 34
"""Letters of a name for which the skeleton's lines are narrow enough."""


def new_mixer(name: str, root: Path, like: str = "pointwise") -> list[Path]:
    """Write the skeleton of a mixer and its rows in the tables.

    Args:
        name: of the mixer, a lower-case identifier such as gated_mean.
        root: of the checkout.
        like: the kind of mixer it begins as, a name in ``SKELETONS``.

    Returns:
        The files that are new or changed.

    Raises:
        MixerError: if the name is not a lower-case identifier, too long or taken, if there is no such kind, or if
            ``root`` is not a checkout.
    """
    if like not in SKELETONS:
        raise MixerError(f"new-mixer: --like takes {', '.join(SKELETONS)}, got {like!r}.")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise MixerError(f"new-mixer: the name must be a lower-case identifier such as gated_mean, got {name!r}.")
    if len(name) > LONGEST:
        raise MixerError(f"new-mixer: the name has {len(name)} letters, at most {LONGEST} fit the lines: {name!r}.")
    source = root / "src/tokenmix"
    table, cases = source / "contrib/__init__.py", root / "tests/cases.py"
    if not table.is_file() or not cases.is_file():
        raise MixerError(
            f"new-mixer: {root} is not a checkout of tokenmix; outside of one, use tokenmix.register_mixer."
        )
    title = name.replace("_", " ").capitalize()
    cls = "".join(part.capitalize() for part in name.split("_"))
    skeleton = SKELETONS[like]
    files = {
        source / f"reference/{name}.py": skeleton.reference,
        source / f"contrib/{name}.py": skeleton.mixer,
        root / f"docs/mixers/{name}.md": skeleton.page,
    }
    taken = [str(file.relative_to(root)) for file in files if file.exists()]
    if name in MIXERS or taken:
        raise MixerError(f"new-mixer: {name!r} is taken{f' ({taken[0]})' if taken else ''}; choose another name.")
    options = json.dumps(skeleton.options)
    text = _with_names(_with_import(table, f"from .{name} import {cls}, {name}"), cls, name)
    rows = {
        table: _with_row(text, "ROWS", f'"{name}": {cls},'),
        cases: _with_row(cases.read_text(), "CASES", f'"{name}": ("{name}", {options}),'),
    }
    for file, template in files.items():
        file.write_text(template.replace("NAME", name).replace("CLASS", cls).replace("TITLE", title))
    for file, text in rows.items():
        file.write_text(text)
    return [*files, *rows, *_tables(root)]


def _tables(root: Path) -> list[Path]:
    """Generate the README's table of mixers from the checkout's own."""
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "tokenmix.lab.report.taxonomy", "README.md"]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip()[-200:]
        raise MixerError(f"new-mixer: wrote the mixer, but not the table in README.md ({why}); run `make tables`.")
    return [root / "README.md"]


def _with_import(file: Path, line: str) -> str:
    """Return the file's text with one more relative import, in alphabetical order."""
    lines = file.read_text().splitlines()
    imports = [i for i, text in enumerate(lines) if text.startswith("from .") and not text.startswith("from ..")]
    index = next((i for i in imports if lines[i].split()[1] > line.split()[1]), imports[-1] + 1)
    return "\n".join([*lines[:index], line, *lines[index:]]) + "\n"


def _with_names(text: str, *names: str) -> str:
    """Return the text with more names in its sorted ``__all__``."""
    begin = text.index("__all__ = [\n") + len("__all__ = [\n")
    end = text.index("]\n", begin)
    lines = sorted([*text[begin:end].splitlines(keepends=True), *(f'    "{name}",\n' for name in names)])
    return text[:begin] + "".join(lines) + text[end:]


def _with_row(text: str, table: str, row: str) -> str:
    """Return the text with one more row at the end of a dict that is a constant of the module."""
    begin = re.search(rf"^{table}\b.*= \{{\n", text, flags=re.MULTILINE)
    if begin is None:
        raise MixerError(f"new-mixer: the table {table} was not found; add the row {row} by hand.")
    end = text.index("\n}\n", begin.end()) + 1
    return f"{text[:end]}    {row}\n{text[end:]}"
