"""Define the hooks of mkdocs: the navigation lists the pages of all mixers, and pages show tables they ask for.

The tables hold measurements, or are made from ``MIXERS``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmix.mixers import CORE, MIXERS
from tokenmix.report.taxonomy import MARK, page_of, taxonomy

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
EXPORTS = "<!-- exports -->"


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
            tiers[cls.about.tier][page] = (
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
        markdown = markdown.replace(MARK, taxonomy(RESULTS / "mixers_small.json", ROOT / "docs/mixers"))
    return markdown.replace(EXPORTS, exports(RESULTS / "exports.json")) if EXPORTS in markdown else markdown


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
