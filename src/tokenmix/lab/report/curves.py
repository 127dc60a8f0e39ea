"""Curves and a table of several runs, drawn with characters for a terminal."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...system.text import si
from ...types import Record
from ..data.metrics_csv import flatten_metrics
from .figures import smooth_values
from .runs import Run, on_most_data
from .watch import Watch, Watched

DRAWN = "┌┐└┘─│┤┬├┴┼━•⣿…"
"""Characters that a frame is drawn with, where the terminal has them."""
PLAIN = str.maketrans("┌┐└┘─│┤┬├┴┼━•…", "++++-|++++++*.")
COLOURS = (33, 208, 35, 175, 214, 81, 244, 142)  # those of the report, in the palette of terminals
RED = 196
LETTERS = "abcdefghijklmnopqrstuvwxyz"
HIGH, LOW = 18, 7  # lines of a chart where there is room, and the fewest that show anything
NONE = "-"
DROPPED = ("rate", "done", "left", "best valid", "step")
"""The columns left out where the terminal is narrow, in this order."""
Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Screen:
    """What frames are drawn on.

    Args:
        width: columns.
        height: lines; None: as many as needed.
        colour: whether colours tell curves apart; otherwise letters do.
        unicode: whether there are more characters than those of ASCII.
    """

    width: int = 80
    height: int | None = None
    colour: bool = False
    unicode: bool = False

    def key(self, i: int) -> str:
        """Return the sign that marks the curve of run ``i`` in the table."""
        return paint_text("━", COLOURS[i % len(COLOURS)]) if self.lines else LETTERS[i % len(LETTERS)]

    @property
    def lines(self) -> bool:
        """Whether curves are lines of dots in colours; otherwise they consist of letters."""
        return self.colour and self.unicode


@dataclass(frozen=True)
class Curve:
    """One run in a chart: a line, and single points beside it."""

    number: int
    line: Points
    dots: Points


def paint_text(text: str, colour: int) -> str:
    """Return text in a colour of a terminal's palette of 256."""
    return f"\x1b[38;5;{colour}m{text}\x1b[0m"


def frame(
    watch: Watch, screen: Screen, *, x: str = "step", metric: str = "loss", notes: list[str] | None = None
) -> str:
    """Draw the runs as text of the screen's size: charts, a table, and a line for whatever is wrong.

    Args:
        x: what the curves are drawn against: "step", "tokens" (or images), or "seconds" of training.
        metric: "loss", "score" on the validation split, or a field of the metrics.
        notes: further lines at the end.
    """
    runs = list(watch.runs.values())
    said = [*watch.notes(), *(notes or [])]
    groups = _groups(runs, x, metric)
    if groups and not _plotext():
        groups, said = {}, [*said, "curves need the extra 'plot': pip install 'tokenmix[plot]'."]
    below = table(runs, screen)
    said = [escape_text(line, screen) for line in said]
    if screen.height is not None:
        said = [_cut(line, screen.width) for line in _first_lines(said, max(1, screen.height // 5))]
        below = _first_lines(below, max(3, screen.height - len(said) - (LOW + 2) * min(1, len(groups))))
    room = len(groups) * (HIGH + 1) if screen.height is None else screen.height - len(below) - len(said)
    lines: list[str] = []
    high = min(room // max(1, len(groups)), HIGH + 12) - 1
    for title, curves in groups.items() if high >= LOW else ():
        lines += [title[: screen.width], *_chart(curves, x, screen, high)]
    text = "\n".join([*lines, *below, *said])
    return text if screen.unicode else text.translate(PLAIN).encode("ascii", "backslashreplace").decode()


def table(runs: list[Watched], screen: Screen) -> list[str]:
    """Return the lines of the table, with one row per run."""
    if not runs:
        return []
    units = sorted({name for run in runs for name in run.last if name.endswith("_per_s")})
    rate = units[0].replace("_per_s", "/s") if len(units) == 1 else "rate"
    makers: dict[str, Callable[[Watched], str]] = {
        "state": lambda run: run.state,
        "step": lambda run: f"{run.step:,}" if run.last else NONE,
        "done": lambda run: f"{math.floor(100 * run.done)}%" if any(run.limits) else NONE,
        "loss": lambda run: _figure(run.last["loss"] / run.metric.nats) if run.last else NONE,
        "best valid": lambda run: NONE if run.best is None else _score(run, run.best),
        "rate": lambda run: _rate(run, len(units) > 1),
        "left": lambda run: clock(run.left) if run.state.startswith("running") and run.left is not None else NONE,
    }
    cells = {name: [name if name != "rate" else rate, *map(make, runs)] for name, make in makers.items()}
    for name in DROPPED:
        if _table_width(cells) + 12 <= screen.width:
            break
        cells.pop(name)
    names = [escape_text(run.name, screen) for run in runs]
    longest = max(8, screen.width - _table_width(cells) - 2)
    names = [_cut(name, longest) for name in names]
    width = max(_cells("run"), *map(_cells, names))
    keys = ["  ", *(f"{screen.key(i)} " for i in range(len(runs)))]
    lines = [key + name + " " * (width - _cells(name)) for key, name in zip(keys, ["run", *names], strict=True)]
    for name, column in cells.items():
        wide = max(map(len, column))
        column = [cell.ljust(wide) if name == "state" else cell.rjust(wide) for cell in column]
        if name == "state" and screen.colour:
            column = [paint_text(c, RED) if c.strip() in ("failed", "killed") else c for c in column]
        lines = [f"{line}  {cell}" for line, cell in zip(lines, column, strict=True)]
    return [line.rstrip() for line in lines]


def clock(seconds: float) -> str:
    """Format a time as hours, minutes and seconds, from 100 hours on in days."""
    whole = round(seconds)
    if whole >= 360_000:
        return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def escape_text(text: str, screen: Screen) -> str:
    r"""Return text without characters that the screen lacks or that move its cursor; they are written as \xNN."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return text if screen.unicode else text.encode("ascii", "backslashreplace").decode()


def _groups(runs: list[Watched], x: str, metric: str) -> dict[str, list[Curve]]:
    """Return the curves of each chart by its title; runs of different units do not share one."""
    found: dict[str, list[Curve]] = {}
    for i, watched in enumerate(runs):
        run = watched.run
        line, dots = _curve(run, x, metric)
        if line[0] or dots[0]:
            found.setdefault(_title(run, metric), []).append(Curve(i, line, dots))
    return found


def _title(run: Run, metric: str) -> str:
    if metric == "loss" and run.metric.own:  # whose evaluations have no loss
        return f"training loss, {run.metric.loss}, smoothed"
    if metric == "loss":
        same = not run.metric.accuracy or run.metric.loss.startswith("cross-entropy")
        points = "validation" if same else "valid cross-entropy"
        return f"training loss, {run.metric.loss}, smoothed; points: {points}"
    return f"{run.metric.label} on the validation split" if metric == "score" else metric


def _curve(run: Run, x: str, metric: str) -> tuple[Points, Points]:
    """Return the line and the points of a run: values of training, smoothed, and of evaluations."""
    accuracy = run.metric.accuracy
    trained = of_valid = metric
    if metric == "loss":  # the field of evaluations whose unit is that of the loss
        of_valid = "cross_entropy" if accuracy or run.metric.own else run.metric.name
    elif metric == "score":
        of_valid = run.metric.name
    steps, places = [line["step"] for line in run.train], [_place(line, x) for line in run.train]
    points = zip(places, [flatten_metrics(line).get(trained) for line in run.train], strict=True)
    line = _numbers(points, 1 / run.metric.nats if metric == "loss" else 1.0)
    evals = on_most_data([e for e in run.evals if e["split"] == "valid"])
    if x == "step":
        places = [e["step"] for e in evals]
    else:  # where the last line of training before it is
        places = [places[i - 1] if (i := bisect.bisect(steps, e["step"])) else None for e in evals]
    points = zip(places, [flatten_metrics(e).get(of_valid) for e in evals], strict=True)
    dots = _numbers(points, 100.0 if metric == "score" and accuracy else 1.0)
    return ((line[0], smooth_values(line[1])), dots) if line[0] else (dots, ([], []))


def _place(line: Record, x: str) -> float | None:
    return line.get(x, line.get("images", line.get("clouds"))) if x == "tokens" else line.get(x)


def _numbers(points: Iterable[tuple[Any, Any]], scale: float) -> Points:
    kept = [(float(a), b * scale) for a, b in points if _finite(a) and _finite(b)]
    return [a for a, _ in kept], [b for _, b in kept]


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _plotext() -> Any:
    """Return the module that draws curves; None where it is not installed."""
    try:
        import plotext
    except ImportError:
        return None
    return plotext


def _chart(curves: list[Curve], x: str, screen: Screen, height: int) -> list[str]:
    """Draw one chart; the first steps, which would flatten all later ones, may lie outside."""
    plot = _plotext()
    plot.clear_figure()
    plot.theme("clear")
    plot.limit_size(False, False)
    plot.plot_size(screen.width, height)
    seen = [y for curve in curves for y in (*curve.line[1][len(curve.line[1]) // 10 :], *curve.dots[1])]
    low, high = min(seen), max(seen)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin
    plot.ylim(low, high)
    for curve in curves:
        colour, letter = COLOURS[curve.number % len(COLOURS)], LETTERS[curve.number % len(LETTERS)]
        xs, ys = _thin_points(_clip_points(curve.line, low, high), 2 * screen.width)
        if xs:
            plot.plot(xs, ys, marker="braille" if screen.lines else letter, color=colour)
        xs, ys = _clip_points(curve.dots, low, high)
        if xs:
            plot.scatter(xs, ys, marker="•" if screen.lines else letter.upper(), color=colour)
    plot.xlabel({"seconds": "seconds of training"}.get(x, x))
    drawn = plot.build()
    return (drawn if screen.colour else plot.uncolorize(drawn)).rstrip("\n").split("\n")


def _clip_points(points: Points, low: float, high: float) -> Points:
    kept = [(x, y) for x, y in zip(*points, strict=True) if low <= y <= high]
    return [x for x, _ in kept], [y for _, y in kept]


def _thin_points(points: Points, most: int) -> Points:
    step = max(1, math.ceil(len(points[0]) / most))
    xs, ys = (values[::-1][::step][::-1] for values in points)  # the last one is always kept
    return xs, ys


def _first_lines(lines: list[str], most: int) -> list[str]:
    return lines if len(lines) <= most else [*lines[: most - 1], f"... and {len(lines) - most + 1} more"]


def _table_width(cells: dict[str, list[str]]) -> int:
    return sum(2 + max(map(len, column)) for column in cells.values())


def _cells(text: str) -> int:
    """Return the columns that a text takes; some characters take two."""
    from rich.cells import cell_len

    return cell_len(text)


def _cut(text: str, width: int) -> str:
    """Shorten a text in its middle."""
    from rich.cells import set_cell_size

    if _cells(text) <= width:
        return text
    ahead = (width - 2) // 2
    return set_cell_size(text, ahead) + ".." + set_cell_size(text[::-1], width - 2 - ahead)[::-1]


def _figure(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else str(value)


def _score(run: Watched, value: float) -> str:
    return f"{100 * value:.2f} %" if run.metric.accuracy else _figure(value)


def _rate(run: Watched, unit: bool) -> str:
    for name, value in run.last.items():
        if name.endswith("_per_s"):
            return si(value) + (f" {name.removesuffix('_per_s')}/s" if unit else "")
    return NONE
