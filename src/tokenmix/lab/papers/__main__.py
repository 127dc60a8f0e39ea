"""Write our values and the page of claims: ``python -m tokenmix.lab.papers docs/claims.md``."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import PAPERS
from .claims_page import page
from .ours import write

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tokenmix.lab.papers", description="Write our values and the page.")
    parser.add_argument("files", nargs="*", type=Path, help="where to write the page of claims")
    given, every = parser.parse_args(), tuple(PAPERS.values())
    write(every)
    for file in given.files:
        file.write_text(page(every))
