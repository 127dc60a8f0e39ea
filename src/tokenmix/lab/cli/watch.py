"""What `tokenmix report --watch` shows: live curves of several runs."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MixerError
from .output import can_show, say

if TYPE_CHECKING:
    from ..report.live import Page
    from ..report.watch import Watch as Runs


@dataclass(frozen=True)
class Watcher:
    """Show the curves and the state of runs as they go on. Ctrl-C ends it; the runs go on.

    Args:
        dirs: run directories, and folders that contain some, in which new ones are found as they appear.
        x: what the curves are drawn against: "step", "tokens" or "seconds".
        metric: what is drawn.
        every: seconds from one look at the runs to the next.
        once: show what there is once and end. Always so where the output is no terminal.
        page: HTML file to which the report is written again when something has changed.
    """

    dirs: list[Path]
    x: str
    metric: str
    every: float
    once: bool
    page: Path | None

    def run(self) -> int:
        """Watch until Ctrl-C, or look once; 1 if the page of the one look could not be written."""
        from ..report.watch import Watch as Runs

        if not self.every > 0:
            raise MixerError(f"report --watch: every must be above 0, got {self.every}.")
        live = not self.once and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        page = self._page(live)
        try:
            runs = Runs(self.dirs)
            if live:
                return self._run_live(runs, page)
            runs.read()
            runs.check_metric(self.metric)
            if page is not None:
                page.renew(runs, True)
            say(self._frame(runs, page, None) or "nothing to show")
        except KeyboardInterrupt:
            pass
        return 0 if live or page is None or not page.trouble else 1

    def _run_live(self, runs: Runs, page: Page | None) -> int:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console, shown = Console(), ""
        try:
            with Live(console=console, screen=True, auto_refresh=False) as screen:
                while True:
                    changed = runs.read()
                    runs.check_metric(self.metric)
                    shown = self._frame(runs, page, console.height)
                    screen.update(Text.from_ansi(shown, no_wrap=True, overflow="crop"), refresh=True)
                    if page is not None:
                        page.renew(runs, changed)
                    time.sleep(self.every)
        finally:
            if shown:
                say(shown)  # the screen that it stood on is gone

    def _frame(self, runs: Runs, page: Page | None, height: int | None) -> str:
        from shutil import get_terminal_size

        from ..report.curves import DRAWN, Screen, frame

        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        screen = Screen(get_terminal_size((80, 24)).columns, height, colour, can_show(DRAWN))
        notes = [page.trouble] if page is not None and page.trouble else []
        return frame(runs, screen, x=self.x, metric=self.metric, notes=notes)

    def _page(self, live: bool) -> Page | None:
        if self.page is None:
            return None
        from ...system.files import check_writable
        from ..report.live import Page

        try:
            import jinja2  # noqa: F401  (the page needs them; checked before the first look)
            import matplotlib  # noqa: F401  (as above)
        except ImportError as why:
            raise MixerError(
                f"report --watch --out needs the extra 'plot' ({why}): pip install 'tokenmix[plot]'."
            ) from None
        check_writable(self.page)
        return Page(self.page, self.every if live else None)
