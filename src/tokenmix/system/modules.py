"""Python modules of the user's own, found from the working folder as ``python`` finds them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def here_on_path(folder: str | None = None) -> Iterator[None]:
    """Have the working folder, or another one, among those that modules are imported from, inside the block."""
    here = os.getcwd() if folder is None else folder
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
