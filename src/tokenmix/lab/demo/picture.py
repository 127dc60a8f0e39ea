"""The pictures of the demo's page: who is best at what, and quality against the state while generating."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ...system.text import number, size
from ...types import Options
from ..report import Run
from ..report.figures import COLOURS, Picture, render_both
from .plan import Measured, Plan
from .tables import SPREAD, best_names, shown_contexts, yardsticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes


INCHES = (6.4, 4.2)
GAP = 1.5
"""Distance between the left edges of two panels; their longest bar has length 1."""
Panel = tuple[str, dict[str, float], Callable[[float], str], set[str]]  # title, values, how to write one, the best
GREY = "#8b949e"


def pictures(plan: Plan, runs: dict[str, Run], measured: Measured) -> list[Picture]:
    """Draw the board that opens the page, and quality against state."""
    return [board(plan, runs, measured), quality_against_state(plan, runs, measured)]


def board(plan: Plan, runs: dict[str, Run], measured: Measured) -> Picture:
    """Draw one row of bars for each model and compressor: quality, state and time of generation; shorter is better."""
    high = shown_contexts(plan)[1]
    scores = {name: score for name, run in runs.items() if (score := run.last_eval("valid")) is not None}
    bits = scores | yardsticks(plan)
    states = {name: float(measured.decode[name][high].state_bytes) for name in runs}
    times = {name: measured.decode[name][high].ms_per_token for name in runs}
    panels: list[Panel] = [
        ("bits per byte of unseen text", bits, partial(number, digits=2), best_names(scores, plus=SPREAD)),
        (f"memory after {high:,} bytes", states, size, best_names(states, times=1.05)),
        ("ms for the next byte", times, partial(number, digits=1), best_names(times, times=1.05)),
    ]
    order = sorted(bits, key=bits.__getitem__) + [name for name in runs if name not in bits]
    ends = "; ".join(
        f"{name}: "
        + ", ".join(f"{shown(values[name])} {title}" for title, values, shown, _ in panels if name in values)
        for name in order
    )
    caption = "Shorter bars are better. Coloured: the best model, and models within noise of it. "
    caption += f"All were trained on the same {plan.tokens:,} bytes, then continued a text of "
    caption += f"{high:,} bytes. Pale: gzip and xz, programs that compress files."
    draw = partial(_board, panels=panels, order=order, models=list(runs))
    drawn = render_both(draw, (11.0, 0.8 + 0.42 * len(order)))
    lines = sum(len(values) + 1.5 for _, values, _, _ in panels)
    narrow = render_both(partial(draw, across=False), (4.6, 0.35 * lines))
    return Picture(*drawn, alt=f"Bars, shorter is better. {ends}.", caption=caption, narrow=narrow)


def _board(ax: Axes, *, panels: list[Panel], order: list[str], models: list[str], across: bool = True) -> None:
    """Draw the panels beside each other, or below each other."""
    ink, left, top = ax.xaxis.label.get_color(), 0.0, 0.0
    ax.axis("off")
    for title, values, shown, winners in panels:
        longest, rows = max(values.values(), default=1.0) or 1.0, [name for name in order if across or name in values]
        at = left if across else -0.75
        ax.text(at, top - 0.75, title, ha="left", va="center", color=ink, fontsize=12, fontweight="bold")
        for y, name in enumerate(rows):
            if not left:
                ax.text(-0.05, top + y, name, ha="right", va="center", color=ink, fontsize=12)
            if name not in values:
                continue
            colour, weight = (COLOURS[2], "bold") if name in winners else (GREY, "normal")
            length, shade = values[name] / longest, 1.0 if name in models else 0.35
            ax.barh(top + y, max(length, 0.004), left=left, height=0.62, color=colour, alpha=shade)
            said: Options = {"ha": "left", "va": "center", "color": ink, "fontsize": 11, "fontweight": weight}
            ax.text(left + length + 0.03, top + y, shown(values[name]), **said)
        left, top = (left + GAP, top) if across else (left, top + len(rows) + 1.5)
    ax.set_xlim(-0.75, (left if across else GAP) - 0.15)
    ax.set_ylim((len(order) if across else top - 1.5) - 0.4, -1.0)


def quality_against_state(plan: Plan, runs: dict[str, Run], measured: Measured) -> Picture:
    """Draw bits per byte at the end of training over the bytes of state."""
    context = shown_contexts(plan)[1]
    states = {name: measured.decode[name][context].state_bytes for name in runs}
    scores = {name: score for name, run in runs.items() if (score := run.last_eval("valid")) is not None}
    limit = yardsticks(plan)["gzip -9"]
    ends = "; ".join(f"{name}: {score:.3f} bits per byte, {size(states[name])}" for name, score in scores.items())
    drawn = render_both(partial(_over_state, scores=scores, states=states, limit=limit, context=context), INCHES)
    caption = "How well each model predicts text it has not seen, against what it keeps in memory after "
    caption += (
        f"{context:,} bytes of text to write the next one. The best corner is at the lower left. Dotted: gzip -9."
    )
    return Picture(*drawn, alt=f"Chart of bits per byte against bytes of state. {ends}.", caption=caption)


def _over_state(ax: Axes, *, scores: dict[str, float], states: dict[str, int], limit: float, context: int) -> None:
    ink = ax.xaxis.label.get_color()
    for i, name in enumerate(states):
        if name in scores:
            ax.plot([states[name]], [scores[name]], "o", color=COLOURS[i], markersize=8)
            place: Options = {
                "xytext": (8, 5 if i % 2 == 0 else -14),
                "textcoords": "offset points",
                "color": ink,
                "fontsize": 9,
            }
            ax.annotate(name, (states[name], scores[name]), **place)
    ax.axhline(limit, color=ink, linestyle=":", linewidth=1)
    ax.set_xscale("log")
    ax.margins(x=0.3, y=0.15)
    ax.set_xlabel(f"bytes of state after {context:,} bytes of text")
    ax.set_ylabel("bits per byte, unseen text")
