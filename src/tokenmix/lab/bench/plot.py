"""A plot of time against length on logarithmic axes; the slope of each line is the exponent of its cost.

python -m tokenmix.lab.bench.plot RESULTS.json OUT.png    # draws a file that `tokenmix bench --json` wrote
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import MixerError
from ...system.files import whole_file
from ...types import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes


WIDTH, HEIGHT, LINE = 4.8, 2.7, 0.19
"""Inches of the plot, of a panel, and of a line of its legend: small, so that text stays legible on a telephone."""
LEVELS = {
    "op": "the operation without projections",
    "layer": "a layer with its projections",
    "decode": "one more token",
    "model": "a whole model",
}
PLAIN = {"sdpa": "fused attention (sdpa)"}
"""Names of peers that a reader may not know."""


def plot(found: Record, path: Path) -> Path:
    """Write a PNG with one panel per pass, one below the other, each with its legend beside it."""
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
    panel = max(HEIGHT, 0.7 + LINE * len({r["subject"] for r in found["rows"]}))
    figure = Figure(figsize=(WIDTH, 0.4 + panel * len(passes)), dpi=150, facecolor=paper, layout="constrained")
    FigureCanvasAgg(figure)
    for ax, each in zip(figure.subplots(len(passes), 1, squeeze=False)[:, 0], passes, strict=True):
        _panel(ax, found, each)
        ax.set_title(each, color=ink, fontsize=9.5)
    s, m = found["setting"], found["machine"]
    where = f"{m['device']}, {m['threads']} threads, torch {m['torch']}"
    what = f"{LEVELS[s['level']]}, batch {s['batch']}, {s['dim']} features, {s['dtype']}"
    figure.suptitle(f"{what}\n{where}", fontsize=8, color=ink)
    with whole_file(Path(path)) as file:
        figure.savefig(file, format="png", metadata={"Software": None})
    return path


def label(row: Record) -> str:
    """Say what a row measured, such as "aft_local, window 32" or "hydra, not causal"."""
    options = [
        "not causal" if (key, value) == ("causal", False) else f"{key} {value}" for key, value in row["options"].items()
    ]
    name: str = row["name"]
    return ", ".join([PLAIN.get(name, name), *options])


def _panel(ax: Axes, found: Record, each: str) -> None:
    from ..report.figures import COLOURS, STYLES

    rows = [r for r in found["rows"] if r["pass"] == each and "wall_s" in r]
    slopes = {f["subject"]: f["exponent"] for f in found["fits"] if f["pass"] == each}
    drawn: list[tuple[float, Any]] = []
    for i, subject in enumerate(dict.fromkeys(r["subject"] for r in rows)):
        own = [r for r in rows if r["subject"] == subject]
        name = label(own[0]) + (f":  {slopes[subject]:.2f}" if subject in slopes else "")
        name += " (wrong)" if any(r["status"] == "wrong" for r in own) else ""
        (line,) = ax.plot(
            [r["T"] for r in own],
            [r["wall_s"] * 1e3 for r in own],
            STYLES[i // len(COLOURS) % len(STYLES)],
            marker="o",
            markersize=3.5,
            linewidth=1.6,
            color=COLOURS[i % len(COLOURS)],
            label=name,
        )
        drawn.append((own[-1]["wall_s"], line))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = sorted({r["T"] for r in rows})
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.tick_params(labelsize=8)
    ax.set_xlabel("tokens of context" if found["setting"]["level"] == "decode" else "tokens T", fontsize=8.5)
    ax.set_ylabel("milliseconds per call", fontsize=8.5)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.legend(
        handles=[line for _, line in sorted(drawn, key=lambda pair: -pair[0])],  # in the order of the lines' right ends
        title="slowest first, and n in time ~ T^n" if slopes else "slowest first",
        title_fontsize=8,
        alignment="left",
        frameon=False,
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.03),
        handlelength=2.6,
        borderaxespad=0.3,
    )


if __name__ == "__main__":
    results, picture = map(Path, sys.argv[1:])
    plot(json.loads(results.read_text()), picture)
