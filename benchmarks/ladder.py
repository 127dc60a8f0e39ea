"""Measure the ladder from AFT to attention: quality, state and time per token, one part at a time.

    python -m benchmarks.ladder              # print the table
    python -m benchmarks.ladder --record     # keep it in results/ladder.json and draw docs/assets/ladder.png

Quality is read from the results of ``benchmarks/sweeps/aft_parts.json``, and recall from those of
``benchmarks/sweeps/recall.json``, as far as their runs have ended. State and time are measured here, on the models of
the sweep with random weights, for one sequence. The models of the controls do not stream: their state is that of
attention at least, as they keep the same keys and values, and their time is left out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from tokenmix.lab.bench import decoding
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.report.figures import COLOURS
from tokenmix.lab.sweep.evidence import compare, plural
from tokenmix.lab.sweep.modules import load_modules
from tokenmix.lab.sweep.plan import SweepPlan
from tokenmix.lab.sweep.results import Results
from tokenmix.mixers import Mixer
from tokenmix.models import build_model
from tokenmix.system.text import number, size

HERE = Path(__file__).parent
RECORD = HERE / "results" / "ladder.json"
PICTURE = HERE.parent / "docs" / "assets" / "ladder.png"
CONTEXT = 8192
MARK = "<!-- ladder -->"


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        row: row of the sweep.
        change: what differs from the rung before, or from ``base``.
        base: the row that it is compared with; None: the first rung.
        place: where the picture writes its name, as an offset in points; None: not in the picture.
        align: which end of the name stands there, "left" or "right".
    """

    row: str
    change: str
    base: str | None
    place: tuple[int, int] | None = (8, 4)
    align: str = "left"


RUNGS = (
    Rung("aft_simple", "the mean of all values, weighed by exp(k)", None),
    Rung("norm", "the mean is RMS-normalised per head", "aft_simple", None),
    Rung("convolution", "q, k and v pass a convolution over 4 tokens", "aft_simple"),
    Rung("convolution, norm", "and the norm", "convolution", (9, -1)),
    Rung("convolution, fixed decay", "the sums decay by exp(g), learned per feature", "convolution", None),
    Rung("convolution, learned decay", "g depends on the token", "convolution, fixed decay", None),
    Rung("aft_forget", "keys are RMS-normalised", "convolution, learned decay", (-8, -4), "right"),
    Rung("aft_forget, norm", "and the ratio, per head", "aft_forget", None),
    Rung("convolution, norm, learned decay", "without normalised keys", "aft_forget, norm", None),
    Rung("convolution, norm, fixed decay", "nor does g depend on the token", "convolution, norm, learned decay", None),
    Rung("aft_forget without convolution", "with the norm, without the convolution", "aft_forget, norm", None),
    Rung(
        "aft_pairs, 1",
        "one sum, whose keys carry a logit and whose decays are those of a head",
        "aft_forget, norm",
        None,
    ),
    Rung("aft_pairs, 4", "4 sums, weighed by the query", "aft_pairs, 1", (7, -8)),
    Rung("aft_pairs, 16", "16 sums", "aft_pairs, 4", (8, 2)),
    Rung("aft_reach, 8", "8 fixed decays, weighed by the query", "aft_forget, norm", None),
    Rung("aft_local", "a learned bias by distance within 32 tokens, no decay", "aft_simple", (8, -14)),
    Rung("aft_local, convolution", "behind a convolution", "aft_local", None),
    Rung("linear", "weights elu(q) + 1 times elu(k) + 1 in place of exp(k)", "aft_simple", None),
    Rung("linear, convolution", "behind a convolution", "linear", None),
    Rung("hydra, convolution", "Hydra instead", "linear, convolution", None),
    Rung(
        "three of aft_forget, one of attention",
        "every fourth layer is attention, the others have the norm",
        "aft_forget, norm",
        (-4, 9),
        "right",
    ),
    Rung("hybrid_3_to_1", "three layers of aft_local, one of attention", "aft_local", None),
    Rung("attention", "softmax of dot products in all layers", "aft_forget", (10, 10), "right"),
    Rung("attention, convolution", "q, k, v pass the convolution", "attention", None),
    Rung("attention, convolution, norm, gate", "and a norm and gate of the output", "attention, convolution", None),
    Rung("attention, convolution, forget gate", "forget gate (FoX), no rotary", "attention, convolution", None),
    Rung(
        "attention, all parts",
        "convolution, forget gate, norm, gate, rotary",
        "attention, convolution",
        (-10, -4),
        "right",
    ),
)


def opened(name: str) -> Results | None:
    """Open the results of a sweep of the project; None where there is no plan of that name."""
    plan = HERE / "sweeps" / f"{name}.json"
    if not plan.exists():
        return None
    return Results.open(HERE / "results" / f"{name}.json", SweepPlan.from_json(json.loads(plan.read_text())))


def measured(plan: SweepPlan, row: str) -> dict[str, Any]:
    """Measure the state of a row's model after ``CONTEXT`` tokens, and the time of one more."""
    model = build_model(replace(plan.config(row).model, max_len=CONTEXT + 64))
    mixers = [m for m in model.modules() if isinstance(m, Mixer)]
    if not all(m.capabilities.streaming for m in mixers):
        return {"state_bytes": None, "ms_per_token": None}
    found = decoding(model, CONTEXT)
    return {"state_bytes": found.state_bytes, "ms_per_token": round(found.ms_per_token, 3)}


def measure() -> dict[str, Any]:
    """Measure every rung."""
    torch.set_num_threads(1)
    parts = opened("aft_parts")
    assert parts is not None
    load_modules(parts.plan.modules)
    rungs = {rung.row: measured(parts.plan, rung.row) for rung in RUNGS}
    return {"machine": machine(), "threads": 1, "context": CONTEXT, "rungs": rungs}


def table(record: dict[str, Any]) -> str:
    """Return the ladder as Markdown, with the scores as they stand now."""
    parts, recall = opened("aft_parts"), opened("recall")
    assert parts is not None
    looked_up = recall is not None and any(recall.scores(row) for row in recall.plan.rows)
    columns = ["rung", "what changes", "bits per byte", "gain"] + ["recall"] * looked_up
    columns += [f"state at {record['context']:,}", "ms per token"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for rung in RUNGS:
        scores, found = parts.scores(rung.row), record["rungs"][rung.row]
        if not scores:
            continue
        both = rung.base is not None and scores.keys() & parts.scores(rung.base).keys()
        gain = f"{-compare(parts, rung.row, rung.base).difference:+.3f}" if both and rung.base else ""
        change = rung.change if rung.base is None else f"`{rung.base}`: {rung.change}"
        cells = [f"`{rung.row}`", change, f"{number(mean(scores.values()))} ({plural(len(scores), 'seed')})", gain]
        right = recall.scores(rung.row) if recall is not None and rung.row in recall.plan.rows else {}
        cells += [f"{mean(right.values()):.1%}" if right else ""] * looked_up
        cells += [state(record, rung.row), number(found["ms_per_token"], 2) if found["ms_per_token"] else ""]
        lines.append(f"| {' | '.join(cells)} |")
    waiting = [f"`{rung.row}`" for rung in RUNGS if not parts.scores(rung.row)]
    return "\n".join([*lines, *(["", f"*Not run yet*: {', '.join(waiting)}."] if waiting else [])])


def state(record: dict[str, Any], row: str) -> str:
    """Return the state of a rung as text; a control has that of attention at least."""
    kept = record["rungs"][row]["state_bytes"]
    return f"above {size(record['rungs']['attention']['state_bytes'])}" if kept is None else size(kept)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw bits per byte against the bytes of state."""
    from matplotlib.figure import Figure

    parts = opened("aft_parts")
    assert parts is not None
    figure = Figure(figsize=(6.4, 5.2), dpi=120, layout="constrained")
    ax = figure.add_subplot()
    for rung in RUNGS:
        scores = list(parts.scores(rung.row).values())
        if rung.place is None or not scores:
            continue
        kept = record["rungs"][rung.row]["state_bytes"] or record["rungs"]["attention"]["state_bytes"]
        softmax = kept >= record["rungs"]["attention"]["state_bytes"] // 8
        colour = COLOURS[1] if softmax else COLOURS[0]
        ax.plot([kept], [mean(scores)], "o", color=colour, markersize=8)
        ax.plot([kept] * len(scores), scores, "_", color=colour, markersize=12)
        at, how = (kept, mean(scores)), {"textcoords": "offset points", "ha": rung.align, "fontsize": 11}
        ax.annotate(rung.row.replace(", one", ",\none"), at, xytext=rung.place, **how)
    for name, value in parts.yardsticks.items():
        ax.axhline(value, color="0.5", linestyle=":", linewidth=1)
        ax.annotate(name, (0.995, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=11)
    ax.set_xscale("log")
    ax.margins(x=0.16)
    ticks = [10 * 2**10, 100 * 2**10, 2**20, 10 * 2**20]
    ax.set_xticks(ticks, ["10 KiB", "100 KiB", "1 MiB", "10 MiB"], fontsize=11)
    ax.tick_params("y", labelsize=11)
    ax.minorticks_off()
    ax.set_xlabel(f"state after {record['context']:,} tokens", fontsize=12)
    ax.set_ylabel("bits per byte, Python sources", fontsize=12)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table where a page of the documentation asks for it; mkdocs calls this."""
    return markdown.replace(MARK, table(json.loads(RECORD.read_text()))) if MARK in markdown else markdown


def main() -> None:
    """Parse the command line, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write results/ladder.json and the picture")
    parser.add_argument("--draw", action="store_true", help="draw the picture from what is recorded, measure nothing")
    given = parser.parse_args()
    record = json.loads(RECORD.read_text()) if given.draw else measure()
    if given.record:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    if given.record or given.draw:
        draw(record, PICTURE)
    print(table(record))


if __name__ == "__main__":
    main()
