"""The report as a page that is written again while its runs go on."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path

from ...errors import MixerError
from .page import write_report
from .watch import Watch

SHARE = 5.0
"""The least time between two pages, as a multiple of what writing one takes."""
RELOAD = 5
"""The fewest seconds after which a browser loads the page again."""


class Page:
    """An HTML page about watched runs.

    Args:
        out: the file to write.
        every: seconds between two looks at the runs; None: the page is written once, and no browser reloads it.
    """

    def __init__(self, out: Path, every: float | None):
        self.out, self.every = out, every
        self.trouble = ""
        self._due, self._old = 0.0, True

    def renew(self, watch: Watch, changed: bool) -> None:
        """Write the page if something has changed since the last one; what goes wrong is left in ``trouble``."""
        self._old |= changed
        if not self._old or time.monotonic() < self._due:
            return
        paths = [run.path for run in watch.runs.values() if run.config and run.state != "deleted"]
        if not paths:
            self.trouble = f"{self.out}: not written, as there is no run yet"
            return
        began = time.monotonic()
        reload = None if self.every is None else max(RELOAD, math.ceil(self.every))
        self.trouble = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # damaged lines are said below the curves
                write_report(paths, self.out, refresh=reload)
            self._old = False
        except MixerError as why:  # a checkpoint may be replaced while it is read: the next attempt finds the new one
            self.trouble = f"{self.out}: not written: {why}"
        except OSError as why:
            self.trouble = f"{self.out}: not written: {why.strerror or why}"
        self._due = time.monotonic() + max(self.every or 0.0, SHARE * (time.monotonic() - began))
