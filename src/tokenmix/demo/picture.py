"""The first pictures of the demo's page: quality against training time, and against the state while generating."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..report import Run
from ..report.figures import COLOURS, Picture, both
from ..system.text import size
from .plan import Measured, Plan
from .tables import shown_contexts, yardsticks

INCHES = (6.4, 4.2)


def quality_pictures(plan: Plan, runs: dict[str, Run], measured: Measured) -> list[Picture]:
    """Draw bits per byte of every model over training time, and at its end over the bytes of its state."""
    context = shown_contexts(plan)[1]
    states = {name: measured.decode[name][context].state_bytes for name in runs}
    scores = {name: score for name, run in runs.items() if (score := run.last_eval("valid")) is not None}
    limit = yardsticks(plan)["gzip -9"]
    ends = "; ".join(f"{name}: {score:.3f} bits per byte, {size(states[name])}" for name, score in scores.items())
    over_time = both(partial(_over_time, runs=runs, limit=limit), INCHES)
    over_state = both(partial(_over_state, scores=scores, states=states, limit=limit, context=context), INCHES)
    first = "How well each model predicts text it has not seen, while it trains; lower is better. Dotted: gzip -9."
    second = f"The same at the end, against what the model keeps in memory after {context:,} bytes of text to write "
    second += "the next one; the best corner is at the lower left."
    return [
        Picture(*over_time, alt=f"Line chart of bits per byte while training. At the end: {ends}.", caption=first),
        Picture(*over_state, alt=f"Chart of bits per byte against bytes of state. {ends}.", caption=second),
    ]


def _over_time(ax: Any, *, runs: dict[str, Run], limit: float) -> None:
    ink = ax.xaxis.label.get_color()
    for i, (name, run) in enumerate(runs.items()):
        points = [
            (seconds, e["bits_per_byte"])
            for e in run.evals
            if e["split"] == "valid" and (seconds := seconds_at(run, e["step"])) is not None
        ]
        if points:
            ax.plot(*zip(*points, strict=True), "o-", color=COLOURS[i], markersize=3, linewidth=1.6, label=name)
    ax.axhline(limit, color=ink, linestyle=":", linewidth=1)
    ax.set_xlabel("seconds of training")
    ax.set_ylabel("bits per byte, unseen text")
    ax.legend(frameon=False, labelcolor=ink, fontsize=9)


def _over_state(ax: Any, *, scores: dict[str, float], states: dict[str, int], limit: float, context: int) -> None:
    ink = ax.xaxis.label.get_color()
    for i, name in enumerate(states):
        if name in scores:
            ax.plot([states[name]], [scores[name]], "o", color=COLOURS[i], markersize=8)
            place = {
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


def seconds_at(run: Run, step: int) -> float | None:
    """Return the training time at a step, by the last line logged up to it; None where there is none."""
    return max((line["seconds"] for line in run.train if line["step"] <= step), default=None)
