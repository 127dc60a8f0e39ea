"""A hook of mkdocs: the page of mixers gets its table from ``MIXERS`` when the site is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenmix.report.taxonomy import MARK, taxonomy

ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table where the page asks for it."""
    if MARK not in markdown:
        return markdown
    return markdown.replace(MARK, taxonomy(ROOT / "benchmarks/results/mixers_small.json", ROOT / "docs/mixers"))
