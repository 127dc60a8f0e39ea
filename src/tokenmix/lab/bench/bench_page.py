"""Tables for pages, from results recorded with ``--json`` or by ``benchmarks/{whole,image}_models.py``.

``python -m tokenmix.lab.bench.bench_page RESULTS PAGE...`` updates tables of pages. A page asks for a result by name,
``<!-- speed: NAME -->`` to ``<!-- /speed -->``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from ...system.text import seconds
from ...types import Record
from .cases import SDPA

MARKED = re.compile(r"(<!-- speed: ([\w-]+) -->\n).*?(\n<!-- /speed -->)", re.DOTALL)


def renew(markdown: str, results: Path) -> str:
    """Return the page with every table it asks for built from ``results``/NAME.json."""
    return MARKED.sub(lambda m: m[1] + table(json.loads((results / f"{m[2]}.json").read_text())) + m[3], markdown)


def table(found: Record) -> str:
    """Build the tables of one recorded result."""
    if "images" in found:
        return _images(found)
    return _models(found) if "tables" in found else _bench(found)


def _bench(found: Record) -> str:
    """Build a table with a row for each subject and a column for each length and pass.

    A cell holds how many times as fast as fused attention it is, the time, and the share of the machine's limit.
    """
    rows = [r for r in found["rows"] if "wall_s" in r]
    points = list(dict.fromkeys((r["length"], r["pass"]) for r in rows))
    cells = {(r["subject"], r["length"], r["pass"]): r for r in rows}
    s = found["setting"]
    size = f"{s['level']}, batch {s['batch']}, {s['dim']} features, {s['heads']} heads, {s['dtype']}"
    several = len({which for _, which in points}) > 1
    lines = [
        f"*{_machine(found['machine'])}; {size}*",
        "",
        _row("", *(f"{n}, {which}" if several else n for n, which in points)),
        "|---" * (len(points) + 1) + "|",
    ]
    for subject in dict.fromkeys(r["subject"] for r in rows):
        lines.append(_row(_name(subject), *(_cell(cells.get((subject, *point))) for point in points)))
    return "\n".join(lines)


def _name(subject: str) -> str:
    """Format a subject with its options apart, so that a narrow column can break it."""
    name, _, options = subject.partition(":")
    return f"`{name}`" + "".join(f" {option}" for option in options.split(",") if option)


def _machine(m: Record) -> str:
    software = f"torch {m['torch']}; kernels {m['kernels']['cpu']}; {m['allocator'].split(';')[0]}"
    return f"{m['device']}, {m['cores']} cores, {m['threads']} threads; {software}"


def _cell(r: Record | None) -> str:
    if r is None:
        return "-"
    if r["subject"] == SDPA:
        return seconds(r["wall_s"])
    ratio = f"{r['x_sdpa']:.3g}x" if r.get("x_sdpa") else "-"
    share = f", {r['share']:.0%} of {r['bound']}" if r.get("share") else ""
    return f"**{ratio}** {seconds(r['wall_s'])}{share}{', wrong' if r['status'] == 'wrong' else ''}"


def _models(found: Record) -> str:
    """Build a table for each size of whole models in training."""
    lines = [f"*{_machine(found['machine'])}; {found['dtype']}*"]
    for label, rows in found["tables"].items():
        lines += [
            "",
            f"**{label}**",
            "",
            _row("", "steps per second", "of fused attention", "peak MiB"),
            "|---" * 4 + "|",
        ]
        for name, r in rows.items():
            lines.append(
                _row(
                    name,
                    *(
                        (f"{r['it/s']:.3g}", f"{r['ratio_to_fused']:.2f}x", f"{r['peak_MiB']:,.0f}")
                        if r
                        else ("does not fit", "-", "-")
                    ),
                )
            )
    return "\n".join(lines)


def _images(found: Record) -> str:
    """Build a table of models of images, in inference and in training; the ratio is to the first of their group."""
    passes = ("inference", "training")
    heads = [f"{which}, {unit}" for which in passes for unit in ("images per second", "MiB")]
    lines = [f"*{_machine(found['machine'])}; {found['setting']}*", ""]
    lines += [_row("", "parameters, M", "multiply-accumulates, G", *heads), "|---" * (len(heads) + 3) + "|"]
    for name, r in found["images"].items():
        cells = [f"{r['parameters'] / 1e6:.1f}", f"{r['giga_macs']:.2f}"]
        for which in passes:
            speed, memory = r[f"{which}_images_per_s"], r[f"{which}_peak_MiB"]
            cells += [f"{speed:.3g}, **{r[f'{which}_ratio']:.2f}x**", f"{memory:,.0f}"]
        lines.append(_row(f"`{name}`", *cells))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    for page in map(Path, sys.argv[2:]):
        page.write_text(renew(page.read_text(), Path(sys.argv[1])))
