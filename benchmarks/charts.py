"""Draw the charts of the README and the documentation from recorded results, as SVG: a script and a hook of mkdocs.

    python -m benchmarks.charts        # writes docs/assets/charts/*.svg

As files they follow the light or dark mode of the reader's system. Pages of the documentation hold them inline, where
their text has the colour of the page, which the reader may switch.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from tokenmix.lab.papers.ours import measured_sweep
from tokenmix.lab.sweep.evidence import compare
from tokenmix.lab.sweep.results import Results
from tokenmix.system.text import size

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
FOLDER = ROOT / "docs/assets/charts"
IMAGE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*assets/charts/(\w+)\.svg"[^>]*>')
BLUE, ORANGE, PURPLE = "#3b8fc4", "#e0702f", "#9a6bc9"
"""Legible on white and on dark pages; apart for colour-blind readers."""
STYLE = "<style>.chart{color:#1b1f24}@media(prefers-color-scheme:dark){.chart{color:#e4e7ea}}</style>"
WIDTH = 520
"""Units of a chart, of which a line of text takes 15: legible on a telephone, too."""
PANEL = 382
"""Height of a panel of the scatter plots."""
LETTER, LINE = 0.56, 1.25
"""Width of a letter and height of a line of text, in font sizes, on the safe side."""
NAMES = {
    "attention": "attention",
    "attention, all parts": "attention, all parts",
    "attention, convolution": "attention, convolution",
    "aft_forget": "AFT-forget",
    "aft_forget, norm": "AFT-forget, norm",
    "aft_conv": "AFT-conv",
    "aft_local": "AFT-local",
    "aft_simple": "AFT-simple",
    "linear": "linear attention",
    "hydra": "Hydra",
    "gated_delta": "Gated DeltaNet",
}
"""What the charts call the rows of ``benchmarks/sweeps/enwik8_modern.json``."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


@dataclass(frozen=True)
class Dot:
    """A dot of a scatter plot: its name, the group that gives its shape and colour, and the range over the seeds."""

    x: float
    y: float
    name: str
    group: str
    low: float
    high: float


GROUPS = {
    "AFT": (BLUE, "circle"),
    "gated recurrences": (PURPLE, "square"),
    "attention, hybrids": (ORANGE, "circle"),
    "others": ("currentColor", "square"),
}
"""The groups of the scatter plots in the order of their legend, each with its colour and shape."""
RECALL = {
    "attention": ("attention", "attention, hybrids"),
    "gated_delta, attention": ("hybrid", "attention, hybrids"),
    "delta": ("DeltaNet", "gated recurrences"),
    "kda": ("KDA", "gated recurrences"),
    "gated_delta": ("Gated DeltaNet", "gated recurrences"),
    "mamba2": ("Mamba-2", "gated recurrences"),
    "aft_pairs, 16": ("AFT-pairs R=16", "AFT"),
    "aft_pairs, 4": ("AFT-pairs R=4", "AFT"),
    "aft_forget, norm": ("AFT-forget, norm", "AFT"),
    "aft_reach": ("AFT-reach", "AFT"),
    "aft_local": ("AFT-local", "AFT"),
    "aft_simple": ("AFT-simple", "AFT"),
    "hydra": ("Hydra", "others"),
    "linear": ("linear attention", "others"),
}
"""The rows of ``benchmarks/sweeps/recall.json`` that are drawn: those that stream, one size of each."""
QUALITY = {
    "attention, all parts": "attention, hybrids",
    "attention": "attention, hybrids",
    "aft_forget": "AFT",
    "aft_conv": "AFT",
    "aft_local": "AFT",
    "aft_simple": "AFT",
    "gated_delta": "gated recurrences",
    "linear": "others",
}
"""The rows of ``benchmarks/sweeps/enwik8_modern.json`` that are drawn against their state: those with a verdict."""


def quality_dots() -> list[Dot]:
    """Return bits per byte on enwik8 against the bytes of state after the tokens of ``ladder.json``.

    The state was recorded after 256 tokens or, if it grows, in ``ladder.json``. Attention with added parts does not
    stream here; it keeps the keys and values of attention at least.
    """
    sweep, dots = _sweep(), []
    grown = json.loads((RESULTS / "ladder.json").read_text())["rungs"]["attention"]["state_bytes"]
    for row, group in QUALITY.items():
        kept = grown if row.startswith("attention") else _state_of(sweep, row)
        dots.append(_dot(sweep, row, kept, NAMES[row], group))
    return dots


def recall_dots() -> list[Dot]:
    """Return the accuracy of recall against the bytes of state after a sequence; equal dots are one with both names."""
    sweep, dots = _sweep("recall"), {}
    for row, (name, group) in RECALL.items():
        dot = _dot(sweep, row, _state_of(sweep, row), name, group)
        same = (dot.x, f"{dot.y:.2f}")
        dots[same] = replace(dots[same], name=f"{dots[same].name}, {name}") if same in dots else dot
    return list(dots.values())


def _state_of(sweep: Results, row: str) -> int:
    return max(run.get("state_bytes") or 0 for run in sweep.finals(row))


def _dot(sweep: Results, row: str, kept: int, name: str, group: str) -> Dot:
    scores = sweep.scores(row).values()
    return Dot(kept, mean(scores), name, group, min(scores), max(scores))


KIB = [(n * 2**10, f"{n} KiB") for n in (1, 10, 100)]
MIB = [(n * 2**20, f"{n} MiB") for n in (1, 10)]


def draw_quality_against_state(*, across: bool) -> str:
    """Draw bits per byte and the accuracy of recall against the bytes of state, each dot with its name and score.

    The two panels are side by side, or one below the other. A line through a dot is the range over the seeds.
    """
    tokens = json.loads((RESULTS / "ladder.json").read_text())["context"]
    length = _sweep("recall").plan.changes["data.seq_len"]
    x = "memory of a stream after {:,} tokens"
    quality = Panel("bits per byte, lower is better", x.format(tokens), KIB + MIB, [1.9, 2.0, 2.1, 2.2], 0.04)
    recall = Panel("accuracy of recall, higher is better", x.format(length), KIB, [0.2, 0.4, 0.6, 0.8, 1.0], 0.1)
    parts, at, y = [], 6.0, 16.0
    for group, (colour, shape) in GROUPS.items():
        if at + 26 + LETTER * 15 * len(group) > (2 * WIDTH if across else WIDTH):
            at, y = 6.0, y + 22
        parts += [_mark(at + 6, y - 5, colour, shape), _text(at + 18, y, group)]
        at += 40 + LETTER * 15 * len(group)
    head = y + 14
    for i, (panel, dots) in enumerate(((quality, quality_dots()), (recall, recall_dots()))):
        left, top = (i * WIDTH, head) if across else (0, head + i * PANEL)
        parts.append(f'<g transform="translate({left:g},{top:g})">\n' + "\n".join(panel.draw(dots)) + "\n</g>")
    return _svg(2 * WIDTH if across else WIDTH, head + (PANEL if across else 2 * PANEL), parts)


def describe_quality_against_state() -> str:
    """Return the words for the picture of ``draw_quality_against_state``: every row with its score and state."""
    said = []
    for dots in (quality_dots(), recall_dots()):
        rows = sorted(dots, key=lambda dot: dot.y, reverse=len(said) > 0)
        said.append("; ".join(f"{dot.name} {dot.y:.2f} ({size(int(dot.x))})" for dot in rows))
    return f"Two scatter plots against the memory of a stream. Bits per byte: {said[0]}. Accuracy of recall: {said[1]}."


def draw_differences_from_attention() -> str:
    """Draw the difference of each row's bits per byte from attention, with its 95 % interval."""
    sweep = _sweep()
    found = {row: compare(sweep, row, "attention") for row in sweep.plan.rows if row != "attention"}
    rows = sorted((row for row in found if found[row].verdict != "cannot be tested"), key=lambda r: found[r].difference)
    colours = {"better": BLUE, "worse": ORANGE}
    left, width, step, top = 178, 340, 30, 34
    low, high = -0.1, 0.46
    at = scale(low, high, left, left + width)
    bottom = top + step * len(rows)
    parts = [_text(at(-0.01), 18, "better than attention", "end"), _text(at(0.01), 18, "worse")]
    parts += [_line(at(v), top, at(v), bottom, faint=v != 0) for v in (-0.1, 0, 0.1, 0.2, 0.3, 0.4)]
    parts += [_text(at(v), bottom + 18, f"{v:+.1f}" if v else "0", "middle") for v in (-0.1, 0, 0.1, 0.2, 0.3, 0.4)]
    parts += [_text(left + width / 2, bottom + 38, "difference in bits per byte", "middle")]
    for i, row in enumerate(rows):
        y, each = top + step * (i + 0.5), found[row]
        colour, margin = colours.get(each.verdict, "currentColor"), each.margin or 0.0
        parts += [_text(left - 12, y + 5, NAMES[row], "end")]
        parts += [_line(at(each.difference - margin), y, at(each.difference + margin), y, colour, 3)]
        parts += [f'<circle cx="{at(each.difference):.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>']
        said = f"{each.difference:+.3f}" + ("" if each.verdict in colours else ", no difference")
        parts += [_text(at(each.difference + margin) + 10, y + 5, said)]
    return _svg(WIDTH, bottom + 50, parts)


def draw_training_speed() -> str:
    """Draw how fast a whole model trains with each mixer, relative to fused attention, at two lengths."""
    record = json.loads((RESULTS / "whole_models_lm.json").read_text())
    names = {
        "attention, fused SDPA": "attention, fused",
        "window of 32, our local attention": "attention, window 32",
        "aft_full": "AFT-full",
        "aft_local 32": "AFT-local, window 32",
        "linear": "linear attention",
        "aft_simple": "AFT-simple",
        "hydra": "Hydra",
    }
    left, width, step, top, most = 178, 300, 46, 4, 3.0
    parts = []
    for i, (row, name) in enumerate(names.items()):
        y = top + step * i
        parts += [_text(left - 12, y + 25, name, "end")]
        for j, (shape, found) in enumerate(record["tables"].items()):
            ratio, length = found[row]["ratio_to_fused"], int(re.findall(r"T=(\d+)", shape)[0])
            colour = (BLUE, ORANGE)[j]
            parts += [_bar(left, y + 2 + 19 * j, width * ratio / most, 17, colour)]
            said = f"{ratio:.2f}x" + (f" at {length:,} tokens" if i == 0 else "")
            parts += [_text(left + width * ratio / most + 8, y + 16 + 19 * j, said)]
    bottom = top + step * len(names)
    parts += [_line(left + width / most, top, left + width / most, bottom, dashed=True)]
    parts += [_line(left, top, left, bottom)]
    return _svg(WIDTH, bottom + 10, parts)


def draw_growth(what: str) -> str:
    """Draw time and memory of a layer against its tokens or features, one panel above the other."""
    record = json.loads((RESULTS / "scaling.json").read_text())
    rows = {
        "attention, unfused": BLUE,
        "attention, fused": BLUE,
        "AFT-full": ORANGE,
        "AFT-local, window 32": ORANGE,
        "linear attention": "currentColor",
        "AFT-simple": ORANGE,
    }
    panels, left, right = (("ms", "milliseconds, forward with backward"), ("MiB", "MiB at the peak")), 62, 336
    parts = []
    sizes = [int(n) for n in record[what]]
    for i, (unit, title) in enumerate(panels):
        top, bottom = 34 + 300 * i, 262 + 300 * i
        lines = {
            name: [
                (n, found[name][unit]) for n, found in zip(sizes, record[what].values(), strict=True) if name in found
            ]
            for name in rows
        }
        numbers = [y for line in lines.values() for _, y in line]
        log_x = scale(math.log(sizes[0]), math.log(sizes[-1]), left, right)
        log_y = scale(math.log(min(numbers)), math.log(max(numbers)), bottom, top)
        parts += [_text(6, top - 16, title)]
        for power in range(math.ceil(math.log10(min(numbers))), math.floor(math.log10(max(numbers))) + 1):
            y = log_y(math.log(10**power))
            parts += [_line(left, y, right, y, faint=True), _text(left - 8, y + 5, f"{10**power:,}", "end")]
        parts += [_text(log_x(math.log(n)), bottom + 19, f"{n:,}", "middle") for n in sizes]
        parts += [_line(left, top, left, bottom), _line(left, bottom, right, bottom)]
        ends = []
        for name, line in lines.items():
            points = [(log_x(math.log(x)), log_y(math.log(y))) for x, y in line]
            at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            dashed = ' stroke-dasharray="5 4"' if name == "attention, fused" else ""
            parts += [f'<polyline points="{at}" fill="none" stroke="{rows[name]}" stroke-width="2"{dashed}/>']
            ends.append((points[-1], name))
        ends.sort(key=lambda end: end[0][1])
        for ((x, y), name), place in zip(ends, _move_apart([y for (_, y), _ in ends], 18), strict=True):
            parts += [_line(x + 3, y, right + 14, place, faint=True), _text(right + 18, place + 5, name)]
    parts += [_text((left + right) / 2, 600, f"{what} of a layer", "middle")]
    return _svg(WIDTH, 612, parts)


def draw_long_range() -> str:
    """Draw accuracy, processor time per step and memory of each mixer on the tasks of the recipe ``long_range``."""
    tasks = {task: measured_sweep(f"long_range_{task}") for task in ("listops", "retrieval")}
    done = {task: found for task, found in tasks.items() if found is not None and found.finals("attention")}
    if not done:
        return _svg(WIDTH, 30, [_text(6, 20, "not run yet")])
    rows = [row for row in next(iter(done.values())).plan.rows if any(found.finals(row) for found in done.values())]
    panels = {
        "accuracy, %": lambda run: 100 * run["score"],
        "ms per step": lambda run: 1e3 * run["cpu_seconds"] / run["steps"],
        "memory, MiB": lambda run: run["peak_mib"],
    }
    left, width, thick, top = 116, 132, 15, 52
    step, parts = thick * len(done) + 10, []
    for j, (task, colour) in enumerate(zip(done, (BLUE, ORANGE), strict=False)):
        x = left + 160 * j
        parts += [_bar(x, 4, 13, 13, colour), _text(x + 19, 16, task)]
    parts += [_text(left - 10, top + step * (i + 0.5), row, "end") for i, row in enumerate(rows)]
    for p, (title, value) in enumerate(panels.items()):
        x = left + width * p
        found = {
            (row, task): mean(value(run) for run in done[task].finals(row))
            for row in rows
            for task in done
            if done[task].finals(row)
        }
        parts += [_text(x, top - 8, title), _line(x, top, x, top + step * len(rows))]
        for (row, task), each in found.items():
            j = list(done).index(task)
            y, long = top + step * rows.index(row) + thick * j, (width - 52) * each / max(found.values())
            parts += [_bar(x, y, long, thick - 2, (BLUE, ORANGE)[j]), _text(x + long + 5, y + 12, f"{each:,.0f}")]
    return _svg(WIDTH, top + step * len(rows) + 8, parts)


def _move_apart(places: Sequence[float], least: float) -> list[float]:
    """Move rising numbers apart until neighbours differ by ``least``, their mean kept."""
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _space_out(groups[-2], least)[-1] + least > _space_out(groups[-1], least)[0]:
            last = groups.pop()
            groups[-1] += last
    return [each for group in groups for each in _space_out(group, least)]


def _space_out(group: Sequence[float], least: float) -> list[float]:
    start = mean(group) - least * (len(group) - 1) / 2
    return [start + least * i for i in range(len(group))]


CHARTS: dict[str, Callable[[], str]] = {
    "quality_state": partial(draw_quality_against_state, across=True),
    "quality_state_narrow": partial(draw_quality_against_state, across=False),
    "quality": draw_differences_from_attention,
    "speed": draw_training_speed,
    "growth_tokens": partial(draw_growth, "tokens"),
    "growth_features": partial(draw_growth, "features"),
    "long_range": draw_long_range,
}
"""What draws each chart, by the name of its file."""


def on_page_content(content: str, **_: Any) -> str:
    """Put the charts of a page inline, without the colours that they have as files; mkdocs calls this."""
    return IMAGE.sub(lambda found: _inline(found[2], found[1]), content)


def _inline(name: str, alt: str) -> str:
    drawn = (FOLDER / f"{name}.svg").read_text().replace(STYLE, "").strip()
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1)


def _sweep(name: str = "enwik8_modern") -> Results:
    found = measured_sweep(name)
    assert found is not None
    return found


@dataclass(frozen=True)
class Panel:
    """The axes of a scatter plot: a logarithmic and a linear one, with what they show and their ticks."""

    y: str
    x: str
    x_ticks: list[tuple[int, str]]
    y_ticks: list[float]
    pad: float

    def draw(self, dots: Sequence[Dot]) -> list[str]:
        """Return dots with their names and scores, as ``WIDTH`` x ``PANEL`` units."""
        left, top, width, height = 40, 30, 470, PANEL - 82
        low, high = (math.log(f(d.x for d in dots)) + pad for f, pad in ((min, -0.6), (max, 0.9)))
        down, up = min(d.low for d in dots) - self.pad, max(d.high for d in dots) + self.pad
        log_x, at_y = scale(low, high, left, left + width), scale(up, down, top, top + height)
        right, bottom = left + width, top + height
        parts = [_text(6, 16, self.y), _text(left + width / 2, bottom + 40, self.x, "middle")]
        parts += [_line(left, at_y(v), right, at_y(v), faint=True) for v in self.y_ticks]
        parts += [_text(left - 8, at_y(v) + 5, f"{v:.1f}", "end") for v in self.y_ticks]
        ticks = [(log_x(math.log(v)), said) for v, said in self.x_ticks if low < math.log(v) < high]
        parts += [_line(v, top, v, bottom, faint=True) for v, _ in ticks]
        parts += [_text(v, bottom + 19, said, "middle") for v, said in ticks]
        parts += [_line(left, top, left, bottom), _line(left, bottom, right, bottom)]
        points = [(log_x(math.log(dot.x)), at_y(dot.y)) for dot in dots]
        names = [f"{dot.name} {dot.y:.2f}" for dot in dots]
        boxes = place_names(points, names, 15, (left, top, right, bottom))
        for dot, name, (px, py), box in zip(dots, names, points, boxes, strict=True):
            colour, shape = GROUPS[dot.group]
            parts += [_line(px, at_y(dot.low), px, at_y(dot.high), colour), _mark(px, py, colour, shape)]
            anchor = "start" if box[0] > px else "end" if box[2] < px else "middle"
            x0 = {"start": box[0], "end": box[2], "middle": (box[0] + box[2]) / 2}[anchor]
            parts += [_text(x0, box[3] - 5, name, anchor)]
        return parts


def _mark(x: float, y: float, colour: str, shape: str) -> str:
    """Return the mark of a dot: a circle or a square."""
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"/>'
    return _bar(x - 5, y - 5, 10, 10, colour)


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear map that takes ``low`` to ``start`` and ``high`` to ``end``."""
    return lambda value: start + (end - start) * (value - low) / (high - low)


def place_names(points: Sequence[tuple[float, float]], names: Sequence[str], font: float, room: Box) -> list[Box]:
    """Find a place beside each point for its name, in which it covers no other name and no point.

    Raises:
        ValueError: if there is none for a name.
    """
    dots: list[Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in points]
    free = []
    for (x, y), name in zip(points, names, strict=True):
        boxes = [
            box
            for box in _places_beside(x, y, LETTER * font * len(name), LINE * font)
            if _inside(box, room) and not any(_overlap(box, dot) for dot in dots)
        ]
        if not boxes:
            raise ValueError(f"chart: there is no room for the name {name!r}.")
        free.append(boxes)
    found = _choose(free, [])
    if found is None:
        raise ValueError(f"chart: there is no room for all of the names {', '.join(names)}.")
    return found


def _places_beside(x: float, y: float, wide: float, high: float) -> list[Box]:
    """Return the boxes of a name beside a point, the best first."""
    places = [(x + 11, y - high / 2), (x - 11 - wide, y - high / 2), (x - wide / 2, y + 9)]
    places += [(x - wide / 2, y - 9 - high), (x + 9, y + 5), (x + 9, y - 5 - high)]
    places += [(x - 9 - wide, y + 5), (x - 9 - wide, y - 5 - high)]
    places += [(x + 7 - wide, y + 9), (x + 7 - wide, y - 9 - high), (x - 7, y + 9), (x - 7, y - 9 - high)]
    return [(left, top, left + wide, top + high) for left, top in places]


def _choose(free: Sequence[list[Box]], taken: list[Box]) -> list[Box] | None:
    """Choose a box from each list so that no two overlap, or return None where that cannot be."""
    if len(taken) == len(free):
        return taken
    for box in free[len(taken)]:
        if not any(_overlap(box, other) for other in taken):
            found = _choose(free, [*taken, box])
            if found is not None:
                return found
    return None


def _inside(box: Box, room: Box) -> bool:
    return box[0] >= room[0] and box[1] >= room[1] and box[2] <= room[2] and box[3] <= room[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _text(x: float, y: float, said: str, anchor: str = "start") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{where}>{html.escape(said)}</text>'


def _line(
    x0: float,
    y0: float,
    x1: float,
    y1: float,
    colour: str = "currentColor",
    width: float = 1,
    *,
    faint: bool = False,
    dashed: bool = False,
) -> str:
    more = ' opacity="0.2"' if faint else ' stroke-dasharray="4 4"' if dashed else ""
    place = f'x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
    return f'<line {place} stroke="{colour}" stroke-width="{width:g}"{more}/>'


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _svg(width: float, height: float, parts: Iterable[str]) -> str:
    font = 'font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif" font-size="15"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width:g} {height:g}" {font}'
    return "\n".join([f'{head} fill="currentColor">', STYLE, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawn in CHARTS.items():
        (FOLDER / f"{name}.svg").write_text(drawn())
