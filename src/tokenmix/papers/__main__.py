"""Write our values and the page of claims: ``python -m tokenmix.papers docs/claims.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from . import PAPERS
from .ours import write
from .page import page

if __name__ == "__main__":
    every = tuple(PAPERS.values())
    write(every)
    for file in map(Path, sys.argv[1:]):
        file.write_text(page(every))
