"""The tables of docs/speed.md, from what `tokenmix bench --json` and `benchmarks/whole_models.py` recorded under benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenmix.bench.table import seconds

RESULTS = Path(__file__).parent / "results"
MARK = re.compile(r"<!-- speed: ([\w*-]+) -->")


def fill(markdown: str) -> str:
    """Put a table wherever the page asks for a recorded result by name."""
    return MARK.sub(lambda found: table(found[1]), markdown)


def table(name: str) -> str:
    """The table of one file of results."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return models(found) if "tables" in found else bench(found)


def bench(found: dict[str, Any]) -> str:
    """A row for each subject and a column for each length and pass: times as fast as fused attention, share of the machine's limit."""
    rows = [r for r in found["rows"] if r["status"] in ("ok", "wrong") and "wall_s" in r]
    points = list(dict.fromkeys((r["length"], r["pass"]) for r in rows))
    cells = {(r["subject"], r["length"], r["pass"]): r for r in rows}
    single = len({p for _, p in points}) == 1
    heads = [f"{length}" if single else f"{length}, {p}" for length, p in points]
    lines = [about(found), "", _row("", *heads), "|---" * (len(points) + 1) + "|"]
    for subject in dict.fromkeys(r["subject"] for r in rows):
        lines.append(_row(f"`{subject}`", *(_cell(cells.get((subject, *point))) for point in points)))
    return "\n".join(lines)


def about(found: dict[str, Any]) -> str:
    """Machine, size and settings in one line."""
    m, s = found["machine"], found["setting"]
    size = f"batch {s['batch']}, {s['dim']} features, {s['heads']} heads, {s['dtype']}"
    return f"*{m['device']}, {m['cores']} cores, {m['threads']} threads; torch {m['torch']}; kernels {m['kernels']['cpu']}; {m['allocator']}; {size}.*"


def _cell(r: dict[str, Any] | None) -> str:
    if r is None:
        return "-"
    time = seconds(r["wall_s"])
    if r["subject"] == "sdpa":
        return time
    wrong = ", wrong" if r["status"] == "wrong" else ""
    share = f", {r['share']:.0%} of {r['bound']}" if r.get("share") else ""
    return f"**{r['x_sdpa']:.3g}x** ({time}{share}{wrong})"


def models(found: dict[str, Any]) -> str:
    """A table for each size of whole models in training."""
    m = found["machine"]
    parts = [f"*{m['device']}, {m['cores']} cores, {found['threads']} threads; torch {m['torch']}; {m['allocator']}; {found['dtype']}.*"]
    for label, rows in found["tables"].items():
        parts += ["", f"**{label}**", "", _row("", "steps per second", "against fused attention", "peak MiB"), "|---" * 4 + "|"]
        for name, r in rows.items():
            cells = (f"{r['it/s']:.3g}", f"{r['ratio_to_fused']:.2f}x", f"{r['peak_MiB']:,.0f}") if r else ("does not fit", "-", "-")
            parts.append(_row(name, *cells))
    return "\n".join(parts)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    import sys

    for wanted in sys.argv[1:]:
        print(table(wanted), end="\n\n")
