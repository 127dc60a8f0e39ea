"""Tables for pages, from results recorded with ``--json`` or by ``{whole_models,image_models,scaling}.py``.

``python -m tokenmix.lab.bench.bench_page RESULTS PAGE...`` updates tables of pages. A page asks for a result by name,
``<!-- speed: NAME -->`` to ``<!-- /speed -->``. A cell holds one number; machine and settings are a footnote.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from ...system.text import seconds
from ...types import Record
from .cases import SDPA

MARKED = re.compile(r"(<!-- speed: ([\w-]+) -->\n).*?(<!-- /speed -->)", re.DOTALL)


def renew(markdown: str, results: Path) -> str:
    """Return the page with every table it asks for built from ``results``/NAME.json."""

    def built(found: re.Match[str]) -> str:
        return found[1] + table(json.loads((results / f"{found[2]}.json").read_text()), found[2]) + "\n" + found[3]

    return MARKED.sub(built, markdown)


def table(found: Record, name: str) -> str:
    """Build the tables of one recorded result, whose footnote has a name."""
    if "images" in found:
        return _images(found, name)
    if "memory" in found:
        return _memory(found, name)
    if "features" in found:
        return _growth(found, name)
    return _models(found, name) if "tables" in found else _bench(found, name)


def _bench(found: Record, name: str) -> str:
    """Build a table with a row for each subject and a column for each length and pass.

    A cell holds how many times as fast as fused attention it is; folded tables have the times, and their shares of the
    machine's limit.
    """
    rows = [r for r in found["rows"] if "wall_s" in r]
    s = found["setting"]
    size = f"{s['level']}, batch {s['batch']}, {s['dim']} features, {s['heads']} heads, {s['dtype']}"
    bounds = list(dict.fromkeys(f"`{r['bound']}`" for r in rows if r.get("share")))
    limits = "by row " * (len(bounds) > 1) + " or ".join(bounds)
    folded = ["Milliseconds:", "", *_grid(rows, lambda r: f"{r['wall_s'] * 1e3:,.3g}")]
    folded += ["", f"Per cent of the limit of the machine, {limits}:", "", *_grid(rows, _share)] if limits else []
    return "\n".join(
        [
            *_grid(rows, _ratio),
            "",
            f"Times as fast as `sdpa`, whose row is its own time.[^{name}]",
            "",
            '??? note "Times and shares of the limit"',
            "",
            *(f"    {line}" if line else "" for line in folded),
            "",
            f"[^{name}]: {_machine(found['machine'])}; {size}.",
        ]
    )


def _grid(rows: list[Record], cell: Callable[[Record], str]) -> list[str]:
    """Build the lines of a table with a row for each subject and a column for each length and pass."""
    points = list(dict.fromkeys((r["length"], r["pass"]) for r in rows))
    cells = {(r["subject"], r["length"], r["pass"]): cell(r) for r in rows}
    wrong = {r["subject"] for r in rows if r["status"] == "wrong"}
    several = len({which for _, which in points}) > 1
    lines = [_row("", *(f"{n}, {which}" if several else n for n, which in points)), "|---" * (len(points) + 1) + "|"]
    for subject in dict.fromkeys(r["subject"] for r in rows):
        name = _name(subject) + (", *wrong*" if subject in wrong else "")
        lines.append(_row(name, *(cells.get((subject, *point), "-") for point in points)))
    return lines


def _name(subject: str) -> str:
    """Format a subject with its options apart, so that a narrow column can break it."""
    name, _, options = subject.partition(":")
    return f"`{name}`" + "".join(f" {option}" for option in options.split(",") if option)


def _machine(m: Record) -> str:
    software = f"torch {m['torch']}; kernels {m['kernels']['cpu']}; {m['allocator'].split(';')[0]}"
    return f"{m['device']}, {m['cores']} cores, {m['threads']} threads; {software}"


def _ratio(r: Record) -> str:
    if r["subject"] == SDPA:
        return seconds(r["wall_s"])
    return f"{r['x_sdpa']:.3g}x" if r.get("x_sdpa") else "-"


def _share(r: Record) -> str:
    return f"{r['share']:.0%}"[:-1] if r.get("share") else "-"


def _models(found: Record, name: str) -> str:
    """Build a table for each size of whole models in training."""
    lines = []
    for label, rows in found["tables"].items():
        lines += [f"**{label}**[^{name}]", ""]
        lines += [_row("", "of fused attention", "steps per second", "peak MiB"), "|---" * 4 + "|"]
        for row, r in rows.items():
            fits = (f"{r['ratio_to_fused']:.2f}x", f"{r['it/s']:.3g}", f"{r['peak_MiB']:,.0f}") if r else None
            lines.append(_row(row, *(fits or ("does not fit", "-", "-"))))
        lines += [""]
    return "\n".join([*lines, f"[^{name}]: {_machine(found['machine'])}; {found['dtype']}."])


def _images(found: Record, name: str) -> str:
    """Build a table of models of images, in inference and in training.

    Speeds are relative to the first model of a group, whose row gives its images per second.
    """
    passes = ("inference", "training")
    heads = [f"{which}{unit}" for which in passes for unit in ("", ", MiB")]
    lines = [_row("", *heads, "parameters, M", "multiply-accumulates, G"), "|---" * (len(heads) + 3) + "|"]
    for model, r in found["images"].items():
        cells = []
        for which in passes:
            first = r[f"{which}_ratio"] == 1
            cells += [f"{r[f'{which}_images_per_s']:.3g} / s" if first else f"{r[f'{which}_ratio']:.2f}x"]
            cells += [f"{r[f'{which}_peak_MiB']:,.0f}"]
        cells += [f"{r['parameters'] / 1e6:.1f}", f"{r['giga_macs']:.2f}"]
        lines.append(_row(f"`{model}`", *cells))
    said = f"Times as fast as the first row of the group, which is in images per second.[^{name}]"
    return "\n".join([*lines, "", said, "", f"[^{name}]: {_machine(found['machine'])}; {found['setting']}."])


def _memory(found: Record, name: str) -> str:
    """Build a table of what keeping freed memory changes: how many times as fast as fused attention, and page faults.

    By wall clock on several threads, and by processor time on one where that was measured.
    """
    memory, kept = found["memory"], {"default": "default", "keep_memory": "kept"}
    threads = list(dict.fromkeys(key.split(", ")[1] for key in memory))
    timed = [(n, setting) for n in threads for setting in kept]
    first = threads[0]
    heads = [f"{n} thread{'s' * (n != '1')}, {kept[setting]}" for n, setting in timed]
    heads += [f"page faults, {word}" for word in kept.values()]
    lines = [_row("", *heads), "|---" * (len(heads) + 1) + "|"]
    for subject in memory[f"default, {first}"]["rows"]:
        cells = []
        for n, setting in timed:
            r = memory[f"{setting}, {n}"]["rows"][subject]
            spent = r["cpu_s" if n == "1" else "wall_s"]
            cells.append(f"{spent * 1e3:,.0f} ms" if r["of_attention"] == 1 else f"{r['of_attention']:.1f}x")
        cells += [f"{memory[f'{setting}, {first}']['rows'][subject]['page_faults']:,}" for setting in kept]
        lines.append(_row(_name(subject), *cells))
    by = {setting: memory[f"{setting}, {first}"] for setting in kept}
    said = f"Resident memory after everything was freed: {by['default']['resident_MiB']:,.0f} MiB by default, "
    said += f"{by['keep_memory']['resident_MiB']:,.0f} MiB kept, {by['keep_memory']['after_reset_MiB']:,.0f} MiB after "
    said += f"`keep_memory(False)`.[^{name}]"
    return "\n".join([*lines, "", said, "", f"[^{name}]: {_machine(found['machine'])}; {found['setting']}."])


def _growth(found: Record, name: str) -> str:
    """Build a table of layers by tokens and by features: how many times as fast as the first row, and the memory."""
    sizes = [(what, n) for what in ("tokens", "features") for n in found[what]]
    heads = [_row("", *(f"{int(n):,} {what}" for what, n in sizes)), "|---" * (len(sizes) + 1) + "|"]
    first, *others = found["features"][sizes[-1][1]]
    speed = [_row(first, *(f"{found[what][n][first]['ms']:,.1f} ms" for what, n in sizes))]
    memory = [_row(first, *(f"{found[what][n][first]['MiB']:,.0f}" for what, n in sizes))]
    for subject in others:
        rows = [(found[what][n][first]["ms"], found[what][n].get(subject)) for what, n in sizes]
        speed.append(_row(subject, *(f"{base / r['ms']:.2f}x" if r else "-" for base, r in rows)))
        memory.append(_row(subject, *(f"{r['MiB']:,.0f}" if r else "-" for _, r in rows)))
    at = f"by tokens of {found['at']['features']} features and by features of {found['at']['tokens']:,} tokens"
    size = "layers, forward with backward, batch 1, a head for 64 features, float32"
    return "\n".join(
        [
            *heads,
            *speed,
            "",
            f"Times as fast as the first row, {at}.[^{name}]",
            "",
            '??? note "Memory"',
            "",
            "    MiB at the peak of a call:",
            "",
            *(f"    {line}" for line in (*heads, *memory)),
            "",
            f"[^{name}]: {_machine(found['machine'])}; {size}.",
        ]
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    for page in map(Path, sys.argv[2:]):
        page.write_text(renew(page.read_text(), Path(sys.argv[1])))
