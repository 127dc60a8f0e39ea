"""A plot of time against length on logarithmic axes; the slope of each line is the exponent of its cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import MixerError

COLUMNS = 2  # of the legend, below each panel


def plot(found: dict[str, Any], path: Path) -> Path:
    """Write a PNG with one panel per pass."""
    passes = list(dict.fromkeys(r["pass"] for r in found["rows"] if "wall_s" in r))
    if not passes:
        raise MixerError("bench: nothing was timed, so there is nothing to plot.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        from ..report.figures import THEMES
    except ImportError as why:
        raise MixerError(f"bench: --plot needs the extra 'plot' ({why}): pip install 'tokenmix[plot]'.") from None
    paper, ink = THEMES["light"]
    lines = -(-len({r["subject"] for r in found["rows"]}) // COLUMNS)
    figure = Figure(figsize=(6.4 * len(passes), 4.2 + 0.2 * lines), dpi=150, facecolor=paper, layout="constrained")
    FigureCanvasAgg(figure)
    for ax, each in zip(figure.subplots(1, len(passes), squeeze=False)[0], passes, strict=True):
        _panel(ax, found, each)
        ax.set_title(each, color=ink, fontsize=11)
    s, m = found["setting"], found["machine"]
    where = f"{m['device']}, {m['threads']} threads, torch {m['torch']}"
    figure.suptitle(f"{s['level']}, B={s['batch']}, dim={s['dim']}, {s['dtype']}; {where}", fontsize=9, color=ink)
    figure.savefig(path, format="png", metadata={"Software": None})
    return path


def _panel(ax: Any, found: dict[str, Any], each: str) -> None:
    from ..report.figures import COLOURS, STYLES

    rows = [r for r in found["rows"] if r["pass"] == each and "wall_s" in r]
    slopes = {f["subject"]: f["exponent"] for f in found["fits"] if f["pass"] == each}
    for i, subject in enumerate(dict.fromkeys(r["subject"] for r in rows)):
        points = [(r["T"], r["wall_s"] * 1e3) for r in rows if r["subject"] == subject]
        label = subject + (f"  T^{slopes[subject]:.2f}" if subject in slopes else "")
        label += " (wrong)" if any(r["status"] == "wrong" for r in rows if r["subject"] == subject) else ""
        style = STYLES[i // len(COLOURS) % len(STYLES)]
        ax.plot(
            *zip(*points, strict=True),
            style,
            marker="o",
            markersize=4,
            linewidth=1.6,
            color=COLOURS[i % len(COLOURS)],
            label=label,
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = sorted({r["T"] for r in rows})
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.set_xlabel("tokens of context" if found["setting"]["level"] == "decode" else "tokens")
    ax.set_ylabel("milliseconds per call")
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.legend(
        frameon=False,
        fontsize=8,
        labelcolor="linecolor",
        ncols=COLUMNS,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        handlelength=3,
    )
