"""Python's garbage collection during imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage inside the block, and as before afterwards.

    An import creates hardly any garbage, but enough objects to trigger a full collection, which visits all of torch's.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
