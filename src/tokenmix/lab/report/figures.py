"""Pictures as data URIs, each drawn twice: for light pages and for dark ones."""

from __future__ import annotations

import base64
import io
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...errors import MixerError
from ...types import Options, Record
from .runs import Run, on_most_data

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F7F7F",
    "#B8A800",
)  # Okabe and Ito: distinguishable for colour-blind readers
STYLES = ("-", "--", "-.", ":")
THEMES = {"light": ("#ffffff", "#1b1f24"), "dark": ("#14171a", "#e4e7ea")}
POINTS = 400


@dataclass(frozen=True)
class Picture:
    """An image for light pages and one for dark pages, as data URIs, with its caption and alternative text.

    ``narrow`` has both once more in a form that can be read on a screen of 390 pixels, where the picture is a wide one.
    """

    light: str
    dark: str
    alt: str
    caption: str
    narrow: tuple[str, str] | None = None


def loss_curves(runs: list[Run]) -> list[Picture]:
    """Draw loss against steps and wall-clock, and accuracy against steps; runs of one metric share a picture."""
    pictures = []
    for metric in dict.fromkeys(r.metric for r in runs if r.train):
        drawn = [r for r in runs if r.train and r.metric == metric]
        for key, label, what in (("step", "step", "training steps"), ("seconds", "seconds of training", "wall-clock")):
            pair = render_both(partial(_draw_curves, runs=drawn, key=key, label=label), (6.4, 4.2))
            ends = ", ".join(
                f"{r.name} ends at {_loss(r, r.train[-1]):.3f}" for r in drawn if math.isfinite(_loss(r, r.train[-1]))
            )
            dots = "; dots are evaluations on the validation split" if metric.nats != 1 else ""
            caption = f"Training loss against {what}: thin as logged, thick smoothed{dots}."
            pictures.append(
                Picture(
                    *pair, alt=f"Line chart of training loss, {metric.loss}, against {what}. {ends}.", caption=caption
                )
            )
        alike = [r for r in runs if r.train and r.metric.label == metric.label]  # whatever their loss in training
        if (metric.accuracy or metric.own) and metric == alike[0].metric and any(r.evals for r in alike):
            pictures.append(_scores(alike))
    return pictures


def _scores(runs: list[Run]) -> Picture:
    """Draw the score on the validation split against steps, in per cent if it is a share, for runs of one metric."""
    names = {"top-1": "top-1 accuracy", "mIoU": "mean intersection over union"}
    metric = runs[0].metric
    what, times, unit = names.get(metric.label, metric.label), 100 if metric.accuracy else 1, " %" * metric.accuracy

    def draw(ax: Axes) -> None:
        for i, run in enumerate(runs):
            steps, scores = evaluations(run, "step")
            ax.plot(
                steps,
                [times * s for s in scores],
                "o-",
                color=COLOURS[i % len(COLOURS)],
                markersize=4,
                linewidth=1.6,
                label=run.name,
            )
        ax.set_xlabel("step")
        ax.set_ylabel(f"{metric.label} on the validation split{unit and ', %'}")
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.legend(frameon=False, labelcolor="linecolor", fontsize=10)

    digits = 1 if metric.accuracy else 3
    ends = ", ".join(f"{r.name} ends at {times * (r.last_eval('valid') or 0):.{digits}f}{unit}" for r in runs)
    return Picture(
        *render_both(draw, (6.4, 4.2)),
        alt=f"Line chart of {what} against training steps. {ends}.",
        caption=f"{what[0].upper()}{what[1:]} on the validation split.",
    )


def heat_map(values: Tensor, *, title: str, x: str, y: str, alt: str, caption: str) -> Picture:
    """Draw a matrix in colours, white at zero, with its scale; arrows on the bar mark values beyond it."""
    array = values.float().numpy()
    low, high, beyond = colour_range(values)

    def draw(ax: Any) -> None:
        shown = ax.imshow(array, cmap="RdBu_r", vmin=-high, vmax=high, aspect="auto", interpolation="nearest")
        bar = ax.figure.colorbar(shown, ax=ax, fraction=0.046, extend=beyond)
        bar.ax.set_ylim(low, high)
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=ax.xaxis.label.get_color())
        for axis, label in ((ax.xaxis, x), (ax.yaxis, y)):
            axis.set_label_text(label)
            axis.get_major_locator().set_params(integer=True)
        ax.set_title(title, color=ax.xaxis.label.get_color(), fontsize=11)

    return Picture(*render_both(draw, (4.6, 3.8)), alt=alt, caption=caption)


def colour_range(values: Tensor) -> tuple[float, float, str]:
    """Return the lowest and highest value with a colour of its own, and matplotlib's ``extend``.

    98 % of the values that are not 0 lie between. A few large ones, such as the first rows of causal attention, would
    leave the rest white. The range is symmetric where there are values of both signs.
    """
    known = values[values.isfinite() & (values != 0)].double()
    if not known.numel():
        return 0.0, 1.0, "neither"
    limit = float(known.abs().quantile(0.98))
    low = -limit if bool((known < 0).any()) else 0.0
    ends = bool((known < low).any()), bool((known > limit).any())
    return (
        low,
        limit,
        {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[ends],
    )


def _loss(run: Run, row: Record) -> float:
    """Return the loss of a logged step in the unit of the run's metric."""
    return float(row["loss"]) / run.metric.nats


def _draw_curves(ax: Axes, runs: list[Run], key: str, label: str) -> None:
    seen = []
    for i, run in enumerate(runs):
        rows = [r for r in run.train if key in r and math.isfinite(_loss(run, r))]
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        at, raw = [r[key] for r in rows], [_loss(run, r) for r in rows]
        smooth = smooth_values(raw)
        step = max(1, len(at) // POINTS)
        ax.plot(at[::step], raw[::step], color=colour, linewidth=0.6, alpha=0.3)
        ax.plot(at[::step], smooth[::step], style, color=colour, linewidth=1.8, label=run.name)
        if run.metric.nats != 1:  # accuracies have their own picture
            ax.plot(*evaluations(run, key), "o", color=colour, markersize=4)
        seen += smooth[len(smooth) // 10 :]
    if seen:
        low, high = min(seen), max(seen)
        ax.set_ylim(
            low - 0.1 * (high - low) - 0.02, high + 0.15 * (high - low) + 0.02
        )  # the first steps would flatten all later ones
    ax.set_xlabel(label)
    ax.set_ylabel(runs[0].metric.loss)
    ax.grid(alpha=0.25, linewidth=0.6)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, labelcolor="linecolor", fontsize=10)


def evaluations(run: Run, key: str) -> tuple[list[float], list[float]]:
    """Return the evaluations with their place on the axis: their step, or the last training seconds before it."""
    name = run.metric.name
    scored = [e for e in run.evals if e.get("split") == "valid" and name in e and math.isfinite(e[name])]
    points = [(e["step"], e[name]) for e in on_most_data(scored)]
    if key == "step":
        return [p[0] for p in points], [p[1] for p in points]
    marks = sorted((r["step"], r[key]) for r in run.train if key in r)
    latest = list(accumulate((at for _, at in marks), max))
    before = [bisect_right(marks, step, key=lambda mark: mark[0]) for step, _ in points]
    known = [(latest[n - 1], score) for n, (_, score) in zip(before, points, strict=True) if n]
    return [p[0] for p in known], [p[1] for p in known]


def smooth_values(values: list[float]) -> list[float]:
    """Compute an exponential average over about a twentieth of the run, corrected for its start."""
    keep = 1 - 1 / max(1.0, len(values) / 20)
    total = weight = 0.0
    out = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def check_drawing(who: str = "report") -> None:
    """Check that what pages and figures need is installed, before any work."""
    try:
        import jinja2  # noqa: F401  (the question is whether it imports)
        import matplotlib  # noqa: F401  (as above)
    except ImportError as why:
        raise MixerError(f"{who} needs the extra 'plot' ({why}): pip install 'tokenmix[plot]'.") from None


def render_both(draw: Callable[[Axes], None], inches: tuple[float, float]) -> tuple[str, str]:
    """Render what ``draw`` puts on a pair of axes, as PNG for light pages and for dark ones.

    It is drawn and laid out once. The dark picture is the light one in other colours, which takes half the time.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paper, ink = THEMES["light"]
    figure = Figure(figsize=inches, dpi=150, facecolor=paper, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    ax.set_facecolor(paper)
    ax.tick_params(colors=ink)
    ax.xaxis.label.set_color(ink)
    ax.yaxis.label.set_color(ink)
    for name, spine in ax.spines.items():
        spine.set_color(ink)
        spine.set_visible(name in ("left", "bottom"))
    draw(ax)
    light = _png(figure)
    figure.set_layout_engine("none")  # keeps the places of the light picture
    _darken(figure, ax)
    return light, _png(figure)


def _darken(figure: Figure, ax: Axes) -> None:
    """Replace ink and paper of the light theme by those of the dark one, wherever they were used."""
    from matplotlib.colors import to_hex

    (_, ink), (dark_paper, dark_ink) = THEMES["light"], THEMES["dark"]
    figure.set_facecolor(dark_paper)
    ax.set_facecolor(dark_paper)
    for each in figure.axes:
        for axis in (each.xaxis, each.yaxis):
            shown = axis.get_tick_params()
            inked: Options = {key: dark_ink for key in ("color", "labelcolor") if shown.get(key) == ink}
            axis.set_tick_params(**inked)
    for artist in figure.findobj():
        for part in ("color", "edgecolor", "facecolor"):
            get, put = getattr(artist, f"get_{part}", None), getattr(artist, f"set_{part}", None)
            if get is None or put is None or artist is figure.patch or artist is ax.patch:
                continue
            colour = get()
            if not isinstance(colour, str) and getattr(colour, "ndim", 1) != 1:  # of a collection: one for each item
                colour = colour[0] if len(colour) == 1 else None
            if colour is not None and len(colour) and to_hex(colour) == ink:
                put(dark_ink)


def _png(figure: Any) -> str:
    """Return a figure as a PNG; ``savefig`` would go through all of it twice."""
    from matplotlib.image import imsave

    figure.canvas.draw()
    out = io.BytesIO()
    unsigned: dict[str, Any] = {"Software": None}  # no version of matplotlib
    imsave(out, figure.canvas.buffer_rgba(), format="png", dpi=figure.dpi, metadata=unsigned)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
