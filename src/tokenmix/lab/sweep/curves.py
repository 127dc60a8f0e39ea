"""Draw the scores of a sweep's runs on validation over tokens, training time and rates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from ...system.files import whole_file
from ...types import Options
from ..report.figures import COLOURS, STYLES, Picture, render_both
from .results import Record, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes


AXES = (0, 2)
"""The places of a curve's points that can be an axis, tokens (or images) and seconds; place 1 is the score."""
SIZE = (6.4, 4.2)
BESIDE = 8
"""Lines that a legend inside the axes has room for; a longer one goes below them and makes the picture higher."""


def draw_curves(results: Results, path: Path) -> None:
    """Draw the final runs over tokens and training time into one file; nothing if none has ended."""
    rows = final_runs(results)
    if not rows:
        return
    columns, extra = 4, _legend_inches(len(rows) + len(results.yardsticks), 4)
    figure = Figure(figsize=(11, 4.5 + extra), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for ax, column in ((left, 0), (right, 2)):
        _draw_final(ax, results, column)
        ax.spines[["top", "right"]].set_visible(False)
    right.set_ylabel("")
    place = {"loc": "outside lower center", "ncols": columns} if extra else {"loc": "outside right upper"}
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, frameon=False, **place)
    with whole_file(path) as file:
        figure.savefig(file, format="png")


def _legend_inches(lines: int, columns: int) -> float:
    """Return the inches that a legend below the axes takes, 0 where it stands beside or inside them."""
    return 0.2 * ceil(lines / columns) if lines > BESIDE else 0.0


def final_runs(results: Results) -> dict[str, list[Record]]:
    """Return the final runs of each row that have a curve."""
    return _rows_with_curves({row: results.finals(row) for row in results.plan.rows})


def _rows_with_curves(rows: dict[str, list[Record]]) -> dict[str, list[Record]]:
    """Return the runs that have a curve, of the rows that have such runs."""
    found = {row: [r for r in runs if r["curve"]] for row, runs in rows.items()}
    return {row: runs for row, runs in found.items() if runs}


def final_pictures(results: Results) -> list[Picture]:
    """Draw the final runs over tokens and over training time; nothing if none has ended."""
    rows = final_runs(results)
    ends = ", ".join(f"{row} ends at {mean(r['curve'][-1][1] for r in runs):.3f}" for row, runs in rows.items())
    what = "the mean over the seeds that have ended, with their range"
    return [
        _picture(
            results,
            partial(_draw_final, results=results, column=column),
            f"{_label(results, column)}: {what}.",
            ends,
            len(rows),
        )
        for column in AXES
        if rows
    ]


def tuning_pictures(results: Results) -> list[Picture]:
    """Draw the tuning runs over tokens and training time, and their scores over rates; nothing if none has ended."""
    rows = _rows_with_curves({row: results.of("tune", row) for row in results.plan.rows})
    ends = ", ".join(
        f"{row} at rate {r['rate']:g} ends at {r['curve'][-1][1]:.3f}" for row, runs in rows.items() for r in runs
    )
    if not ends:
        return []
    what = "a colour for each row, a style for each rate; runs that end early were given up"
    over = [
        _picture(
            results,
            partial(_draw_tuning, rows=rows, results=results, column=column),
            f"{_label(results, column)}: {what}.",
            ends,
            len(rows) + len(_rates(rows)),
        )
        for column in AXES
    ]
    what = "at the end of the tuning runs; a cross was given up half-way"
    return [
        *over,
        _picture(
            results, partial(_draw_rates, rows=rows, results=results), f"the learning rate, {what}.", ends, len(rows)
        ),
    ]


def _picture(results: Results, draw: Callable[[Axes], None], caption: str, ends: str, lines: int) -> Picture:
    """Return a picture with a legend that has room for this number of lines and the yardsticks."""
    extra = _legend_inches(lines + len(results.yardsticks), 2)

    def with_legend(ax: Axes) -> None:
        draw(ax)
        place: Options = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2} if extra else {}
        ax.legend(frameon=False, labelcolor=ax.xaxis.label.get_color(), fontsize=9, **place)

    against = f"{results.metric()} on validation against {caption}"
    return Picture(
        *render_both(with_legend, (SIZE[0], SIZE[1] + extra)),
        alt=f"Line chart of {against} {ends}.",
        caption=against[0].upper() + against[1:],
    )


def _draw_final(ax: Axes, results: Results, column: int) -> None:
    for row, runs in final_runs(results).items():
        colour, style = _colour(results, row), _style(results, row)
        shared = min(len(r["curve"]) for r in runs)
        points = [[r["curve"][k] for r in runs] for k in range(shared)]
        points = [p for p in points if all(each[column] is not None for each in p)]
        x = [mean(each[column] for each in p) for p in points]
        ax.plot(x, [mean(each[1] for each in p) for p in points], style, label=row, color=colour, linewidth=1.5)
        low, high = ([pick(each[1] for each in p) for p in points] for pick in (min, max))
        ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    _finish(ax, results, _label(results, column))


def _draw_tuning(ax: Axes, rows: dict[str, list[Record]], results: Results, column: int) -> None:
    rates = sorted(results.plan.rates)
    for row, runs in rows.items():
        for r in runs:
            points = [p for p in r["curve"] if p[column] is not None]
            style = STYLES[rates.index(r["rate"]) % len(STYLES)]
            x, y = [p[column] for p in points], [p[1] for p in points]
            ax.plot(x, y, style, marker="o", markersize=3, color=_colour(results, row), linewidth=1.5)
        ax.plot([], [], color=_colour(results, row), linewidth=1.5, label=row)
    for rate in _rates(rows):
        style = STYLES[rates.index(rate) % len(STYLES)]
        ax.plot([], [], style, color="0.5", linewidth=1.5, label=f"rate {rate:g}")
    _finish(ax, results, _label(results, column))


def _rates(rows: dict[str, list[Record]]) -> list[float]:
    """Return the rates of the runs that are drawn."""
    return sorted({r["rate"] for runs in rows.values() for r in runs})


def _draw_rates(ax: Axes, rows: dict[str, list[Record]], results: Results) -> None:
    for row, runs in rows.items():
        scored = [r for r in runs if r["score"] is not None]
        whole = [r for r in scored if not r["stopped"]]
        colour, style = _colour(results, row), _style(results, row)
        rates, scores = [r["rate"] for r in whole], [r["score"] for r in whole]
        ax.plot(rates, scores, "o" + style, color=colour, markersize=4, label=row)
        given_up = [r for r in scored if r["stopped"]]
        ax.plot([r["rate"] for r in given_up], [r["score"] for r in given_up], "x", color=colour, markersize=6)
    ax.set_xscale("log")
    ax.set_xticks(results.plan.rates, [f"{rate:g}" for rate in results.plan.rates])
    ax.set_xticks([], minor=True)
    _finish(ax, results, "learning rate")


def _finish(ax: Axes, results: Results, label: str) -> None:
    for name, value in results.yardsticks.items():
        ax.axhline(value, color="0.5", linestyle=":", linewidth=1, label=name)
    ax.set_xlabel(label)
    ax.set_ylabel(f"{results.metric()} on validation")
    ax.grid(alpha=0.25, linewidth=0.6)


def _label(results: Results, column: int) -> str:
    return "training time in s" if column else f"{results.unit()} seen"


def _colour(results: Results, row: str) -> str:
    return COLOURS[list(results.plan.rows).index(row) % len(COLOURS)]


def _style(results: Results, row: str) -> str:
    """Return the style of a row's line: another one each time the colours begin again."""
    return STYLES[list(results.plan.rows).index(row) // len(COLOURS) % len(STYLES)]
