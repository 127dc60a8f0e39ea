"""The first picture of the demo's page: quality against training time, and against the state while generating."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..report import Run
from ..report.figures import COLOURS, Picture, both
from ..system.text import size
from .plan import Measured, Plan
from .tables import shown_contexts, yardsticks


def quality_picture(plan: Plan, runs: dict[str, Run], measured: Measured) -> Picture:
    """Draw bits per byte of every model over training time, and at its end over the bytes of its state."""
    context = shown_contexts(plan)[1]
    pair = both(partial(_draw, plan=plan, runs=runs, measured=measured, context=context), (10.4, 4.2))
    ends = "; ".join(
        f"{name}: {score:.3f} bits per byte, {size(measured.decode[name][context].state_bytes)}"
        for name, run in runs.items()
        if (score := run.last_eval("valid")) is not None
    )
    caption = "Left: how well each model predicts text it has not seen, while it trains. Right: the same at the end, "
    caption += f"against what it must keep in memory after {context:,} bytes of text to write the next one. Lower is "
    caption += "better on both axes; dotted: gzip -9 on the same text."
    return Picture(*pair, alt=f"Two charts of bits per byte. {ends}.", caption=caption)


def _draw(ax: Any, *, plan: Plan, runs: dict[str, Run], measured: Measured, context: int) -> None:
    ink = ax.xaxis.label.get_color()
    right = ax.inset_axes((1.1, 0.0, 0.9, 1.0), sharey=ax)
    right.set_facecolor(ax.get_facecolor())
    right.tick_params(colors=ink, labelleft=False)
    for name, spine in right.spines.items():
        spine.set_color(ink)
        spine.set_visible(name in ("left", "bottom"))
    for i, (name, run) in enumerate(runs.items()):
        times = {line["step"]: line["seconds"] for line in run.train}
        points = [
            (times[e["step"]], e["bits_per_byte"]) for e in run.evals if e["split"] == "valid" and e["step"] in times
        ]
        if not points:
            continue
        ax.plot(*zip(*points, strict=True), "o-", color=COLOURS[i], markersize=3, linewidth=1.6, label=name)
        state = measured.decode[name][context].state_bytes
        right.plot([state], [points[-1][1]], "o", color=COLOURS[i], markersize=8)
        right.annotate(name, (state, points[-1][1]), xytext=(7, 5), textcoords="offset points", color=ink, fontsize=9)
    for each in (ax, right):
        each.axhline(yardsticks(plan)["gzip -9"], color=ink, linestyle=":", linewidth=1)
    right.set_xscale("log")
    right.margins(x=0.3)
    right.set_xlabel(f"bytes of state after {context:,} bytes of text", color=ink)
    ax.set_xlabel("seconds of training")
    ax.set_ylabel("bits per byte, unseen text")
    ax.legend(frameon=False, labelcolor=ink, fontsize=9)
