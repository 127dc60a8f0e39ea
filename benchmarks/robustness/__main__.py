"""Run the attempts, each in its own process, and keep what happened in a table."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RECORD = HERE.parent / "results" / "robustness.json"
PAGE = HERE.parents[1] / "docs" / "robustness.md"
LIMIT = 240  # seconds for one attempt
HEAD = """# Attempts to break it

Each line is an attempt of `benchmarks/robustness`, run at two revisions: *before*, where it was found, and *after*, \
once it was mended. The page is written
by `python -m benchmarks.robustness --as after`, and each line can be repeated with `--only` and a word of its title.
An ImportError or AttributeError *before* means that the function which the attempt calls did not exist there.
"""


def attempts() -> dict[str, tuple[str, str, str]]:
    """Return key -> (area, number, title) of every attempt, in the order of the files."""
    found = {}
    for area in sorted(m.name for m in pkgutil.iter_modules([str(HERE)]) if not m.name.startswith("_")):
        for name, run in vars(importlib.import_module(f"benchmarks.robustness.{area}")).items():
            about = getattr(run, "attempt", None)
            if about is not None:
                found[f"{area}.{name}"] = (area, about.number, about.title)
    return found


def result_of(key: str) -> str:
    """Return the result of one attempt, made in a fresh process and an empty folder."""
    area, name = key.split(".")
    call = f"from benchmarks.robustness.{area} import {name}; print('\\n' + str({name}()))"
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", ""), str(HERE.parents[1] / "src")])
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", call],
                env={**os.environ, "PYTHONPATH": paths},
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return f"hangs (stopped after {LIMIT} s)"
    if done.returncode < 0:
        return f"the process dies of signal {-done.returncode}"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    line = " ".join(said[-1].split()) if said else "says nothing"
    return re.sub(r"/[^\s'\"]*/(?=src/tokenmix/)", "", line).replace(folder, "FOLDER")[:300]


def page(record: dict[str, dict[str, str]], known: dict[str, tuple[str, str, str]]) -> str:
    """Return the table as Markdown, one section per area."""
    lines, area = [HEAD], None
    for key, (where, number, title) in known.items():
        if where != area:
            area = where
            lines += [
                f"\n## {area.replace('_', ' ').capitalize()}\n",
                "| | attempt | before | after |",
                "|---|---|---|---|",
            ]
        told = record.get(key, {})
        before, after = (told.get(column, "not run").replace("|", "\\|") for column in ("before", "after"))
        lines.append(f"| {number} | {title} | {before} | {after} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.robustness", description="Try to break the library, and say what happened."
    )
    parser.add_argument("--only", default="", help="a word of the area, name or title")
    parser.add_argument(
        "--as", dest="column", choices=("before", "after"), help="record the results in this column and write the page"
    )
    args = parser.parse_args()
    known = attempts()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for key, (area, number, title) in known.items():
        if args.only.lower() not in f"{key} {title}".lower():
            continue
        told = result_of(key)
        print(f"{area} {number:>5}  {title}: {told}", flush=True)
        if args.column:
            record.setdefault(key, {})[args.column] = told
            RECORD.write_text(json.dumps({k: record[k] for k in known if k in record}, indent=1) + "\n")
    if args.column:
        PAGE.write_text(page(record, known))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
