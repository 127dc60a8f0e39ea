"""Define the hooks of mkdocs: the navigation lists the pages of all mixers, and pages show tables they ask for.

The tables hold measurements, or are made from ``MIXERS``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmix.lab.papers.ours import measured_sweep
from tokenmix.lab.report.taxonomy import MARK, page_of, taxonomy
from tokenmix.lab.sweep.results import markdown, results_table
from tokenmix.lab.sweep.sweep_page import comparison_table
from tokenmix.mixers import CORE, MIXERS
from tokenmix.system.text import number

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
EXPORTS = "<!-- exports -->"
SIGNALS = "<!-- signals -->"
SWEEP = re.compile(r"<!-- sweep (\w+) -->")
"""A page asks for the table of a sweep by the name of its plan under benchmarks/sweeps."""


def on_config(config: Any, **_: Any) -> Any:
    """Put the pages of the mixers into the navigation."""
    config.nav = with_mixers(config.nav)
    return config


def with_mixers(nav: list[Any]) -> list[Any]:
    """Return the navigation with the mixers' pages, one section per tier, below the section called Mixers."""
    tiers: dict[str, dict[str, str]] = {"core": {}, "extended": {}}
    for name, cls in MIXERS.items():
        page = page_of(name, ROOT / "docs/mixers")
        if page is not None and not any(page in known for known in tiers.values()):
            tiers[cls.facts.about.tier][page] = (
                (ROOT / f"docs/mixers/{page}.md").read_text().split("\n")[0].removeprefix("# ").split(":")[0]
            )
    sections = [
        {tier.capitalize(): [{title: f"mixers/{page}.md"} for page, title in pages.items()]}
        for tier, pages in tiers.items()
    ]
    return [
        {"Mixers": [*entry["Mixers"], *sections]} if isinstance(entry, dict) and "Mixers" in entry else entry
        for entry in nav
    ]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables where the page asks for them."""
    if MARK in markdown:
        markdown = markdown.replace(MARK, taxonomy(ROOT / "docs/mixers"))
    if EXPORTS in markdown:
        markdown = markdown.replace(EXPORTS, exports(RESULTS / "exports.json"))
    if SIGNALS in markdown:
        markdown = markdown.replace(SIGNALS, signals(RESULTS / "signals.json"))
    return SWEEP.sub(lambda found: sweep(found[1]), markdown)


def sweep(name: str) -> str:
    """Return what a sweep has found: its table, how the rows compare with the first, and what is not run yet."""
    results = measured_sweep(name)
    if results is None:
        raise FileNotFoundError(f"docs: there is no plan benchmarks/sweeps/{name}.json.")
    plan = results.plan
    command = f"`tokenmix sweep benchmarks/sweeps/{name}.json`"
    done = [row for row in plan.rows if results.scores(row)]
    if not done:
        return f"*Not measured yet*: {command} trains {', '.join(f'`{row}`' for row in plan.rows)}.\n"
    open_rows = [f"`{row}`" for row in plan.rows if len(results.scores(row)) < len(plan.seeds)]
    rest = f"*Seeds still to be run*: {', '.join(open_rows)}.\n" if open_rows else ""
    table, verdicts = results_table(results), comparison_table(results)
    shown = [replace(each, rows=[line for line in each.rows if line[0] in done]) for each in (table, verdicts)]
    parts = [markdown(each) for each in shown if each.rows]
    return "\n".join([*parts, f"Repeat it with {command}. {rest}"])


def signals(results: Path) -> str:
    """Return the findings of ``benchmarks/signals.py``: signal by position, and gradients by role."""
    record: dict[str, Any] = json.loads(results.read_text())
    mixers, steps = record["mixers"], record["steps"]
    at = list(mixers["attention"]["start"])
    lines = [f"| mixer | {' | '.join(f't = {int(t):,}' for t in at)} | t = 256, {steps} steps later |"]
    lines += ["|---" * (len(at) + 2) + "|"]
    for name, found in mixers.items():
        cells = [f"{found['start'][t]:.3f}" if t in found["start"] else "" for t in at]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {found['after']['256']:.3f} |")
    lines += [
        "",
        "| mixer | matrices | the mixer's own tensors | embeddings | biases and norms |",
        "|---|---|---|---|---|",
    ]
    for name, found in mixers.items():
        pairs = [found["gradients"].get(role) for role in ("matrix", "mixer", "embedding", "vector")]
        cells = [" / ".join(map(_figures, pair)) if pair else "none" for pair in pairs]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _figures(value: float) -> str:
    """Format a measurement with three figures and no power of ten: 0.317, 43.5, 5,890."""
    return number(value, 0 if value >= 100 else 1 if value >= 10 else 3)


def exports(results: Path) -> str:
    """Return the findings of ``benchmarks/exports.py``: one line per mixer, core mixers first."""
    found: dict[str, Any] = json.loads(results.read_text())["mixers"]
    head = ["| mixer | batch | length | decode step | largest difference to torch |", "|---|---|---|---|---|"]
    return "\n".join(
        [*head, *(_export(name, found[name]) for name in sorted(found, key=lambda name: name not in CORE))]
    )


def _export(name: str, found: dict[str, Any]) -> str:
    whole, step = found["whole"], found["decode"]
    if "refused" in whole:
        return f"| `{name}` | | | | not exported: {whole['refused']} |"
    low, high = whole["length"]
    length = (
        f"{low} only"
        if low == high
        else f"{low} to {high}{', padded' if whole['padded'] else ''}"
        if high
        else f"from {low}"
    )
    why = step.get("refused", "").removeprefix("export: ")
    decodes = "none: " + ("it does not stream" if "no streaming form" in why else why) if why else "yes"
    worst = max(part["difference"] for part in (whole, step) if "refused" not in part)
    return f"| `{name}` | {'any' if whole['batch'] is None else whole['batch']} | {length} | {decodes} | {worst:.1e} |"
