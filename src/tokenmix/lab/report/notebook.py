"""A curve in a notebook that grows while a model is trained."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ...errors import MixerError
from ...types import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LiveCurve:
    """Draw a number of training and of validation below the cell that trains: ``train(..., on_log=LiveCurve())``.

    Args:
        metric: the field of the lines to draw, such as "loss", "lr" or "accuracy".
        every: the least seconds between two pictures.
    """

    def __init__(self, metric: str = "loss", every: float = 1.0):
        try:
            from IPython.display import display
        except ImportError:
            raise MixerError("LiveCurve: it draws in a notebook, which needs IPython: pip install ipython.") from None
        self.metric, self.every = metric, every
        self.points: dict[str, tuple[list[int], list[float]]] = {"train": ([], []), "eval": ([], [])}
        self._show: Any = display
        self._handle: Any = None
        self._due = 0.0

    def __call__(self, line: Record) -> None:
        """Take a line of metrics and draw the curve again, if the last picture is old enough."""
        if self.metric not in line or line["kind"] not in self.points:
            return
        steps, values = self.points[line["kind"]]
        steps.append(line["step"])
        values.append(line[self.metric])
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self.every
        self.draw()

    def draw(self) -> None:
        """Replace the picture by one of all points."""
        if self._handle is None:
            self._handle = self._show(self.figure(), display_id=True)
        else:
            self._handle.update(self.figure())

    def figure(self) -> Figure:
        """Return the curve as a figure of matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        for (kind, (steps, values)), style in zip(self.points.items(), ("-", "o"), strict=True):
            axes.plot(steps, values, style, label=kind)
        axes.set_xlabel("step")
        axes.set_ylabel(self.metric)
        axes.legend()
        return figure
