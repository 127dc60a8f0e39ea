"""Tables of the mixers as Markdown, built from their classes: one for the page of mixers, one for the README.

``python -m tokenmix.lab.report.taxonomy README.md`` updates the README's table.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ...mixers import MIXERS, Mixer, state_growth
from ...mixers.facts import page_stem

MARK = "<!-- mixers -->"
README, README_END = "<!-- mixers: core -->", "<!-- /mixers -->"


def taxonomy(pages: Path) -> str:
    """Return one table of the core mixers and one of the extended ones.

    Args:
        pages: the folder with the mixers' pages.
    """
    parts = []
    for tier in ("core", "extended"):
        head = "| mixer | class | paper | time | space | causal | state |"
        rows = [_row(name, pages) for name, cls in MIXERS.items() if cls.facts.about.tier == tier]
        parts += [f"## {tier.capitalize()}", "", head, "|---" * 7 + "|", *rows, ""]
    return "\n".join(parts)


def page_of(name: str, pages: Path) -> str | None:
    """Return the stem of a mixer's page; None if there is none."""
    page = page_stem(MIXERS[name])
    return page if (pages / f"{page}.md").is_file() else None


def _row(name: str, pages: Path) -> str:
    cls = MIXERS[name]
    page = page_of(name, pages)
    link = f"[`{name}`]({page}.md)" if page else f"`{name}`"
    kind, time, space = (
        text.replace("^2", "²") for text in (cls.facts.about.kind, cls.facts.about.time, cls.facts.about.space)
    )
    paper = cls.facts.about.paper.split(", arXiv")[0]
    causal = "only" if cls.facts.causal_only else "yes" if cls.facts.causal else "no"
    return f"| {link} | {kind} | {paper} | {time} | {space} | {causal} | {state_growth(name)} |"


def readme_table() -> str:
    """Return the README's table of core mixers and its list of extended ones."""
    head = "| name | mixes | causal | streaming state | context (cross) | pair mask | grid | time |"
    rows = [_capabilities(name, cls) for name, cls in MIXERS.items() if cls.facts.about.tier == "core"]
    extended = {name: cls for name, cls in MIXERS.items() if cls.facts.about.tier == "extended"}
    kinds = {
        kind: [f"`{n}`" for n, cls in extended.items() if cls.facts.about.kind == kind]
        for kind in dict.fromkeys(cls.facts.about.kind for cls in extended.values())
    }
    listed = ", ".join(f"{kind.replace(', ', ' and ')} ({', '.join(names)})" for kind, names in kinds.items())
    blind = ", ".join(f"`{n}`" for n, cls in MIXERS.items() if not cls.facts.causal)
    said = "These are the core mixers. The extended ones keep the same contract, pass the same tests "
    fused = " and ".join(f"`{n}`" for n, cls in extended.items() if cls.facts.kernels.whole)
    said += f"and run in plain torch, or {fused} on a C kernel:"
    return "\n".join(
        [
            head,
            "|---" * 8 + "|",
            *rows,
            "",
            f"{said} {listed}.",
            f"Without a causal form, as their pages explain: {blind}.",
        ]
    )


def _capabilities(name: str, cls: type[Mixer]) -> str:
    grid = "no" if not cls.facts.grid else "1-D, 2-D, 3-D"
    causal = (
        "no" if not cls.facts.causal else "in 1-D" if cls.facts.grid else "only" if cls.facts.causal_only else "yes"
    )
    flags = ["yes" if able else "no" for able in (cls.facts.context, cls.facts.attn_mask)]
    return (
        "| "
        + " | ".join(
            [
                f"`{name}`",
                cls.facts.about.idea,
                causal,
                state_growth(name),
                *flags,
                grid,
                cls.facts.about.time.replace("^2", "²"),
            ]
        )
        + " |"
    )


def update_readme(readme: str) -> str:
    """Return the README's text with its table updated."""
    return re.sub(f"({README}\n).*?(\n{README_END})", lambda m: m[1] + readme_table() + m[2], readme, flags=re.DOTALL)


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(update_readme(file.read_text()))
