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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from tokenmix.lab.papers.ours import measured_sweep
from tokenmix.lab.sweep.evidence import compare
from tokenmix.lab.sweep.results import Results

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
FOLDER = ROOT / "docs/assets/charts"
IMAGE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*assets/charts/(\w+)\.svg"[^>]*>')
BLUE, ORANGE = "#3b8fc4", "#e0702f"
"""Legible on white and on dark pages; apart for colour-blind readers."""
STYLE = "<style>.chart{color:#1b1f24}@media(prefers-color-scheme:dark){.chart{color:#e4e7ea}}</style>"
WIDTH = 520
"""Units of a chart, of which a line of text takes 15: legible on a telephone, too."""
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
    """A dot of a scatter plot, with its name."""

    x: float
    y: float
    name: str
    colour: str


def draw_quality_against_state() -> str:
    """Draw bits per byte on enwik8 against the bytes of state after 8,192 tokens, each dot with its name.

    The state was recorded after 256 tokens or, if it grows, in ``ladder.json``. Attention with added parts does not
    stream here; it keeps the keys and values of attention at least. Rows with no verdict are left out.
    """
    sweep, ladder = _sweep(), json.loads((RESULTS / "ladder.json").read_text())
    grown = ladder["rungs"]["attention"]["state_bytes"]
    dots = []
    rows = (
        "attention, all parts",
        "aft_forget",
        "attention",
        "aft_conv",
        "gated_delta",
        "aft_local",
        "aft_simple",
        "linear",
    )
    for row in rows:
        softmax = row.startswith("attention")
        kept = grown if softmax else max(run.get("state_bytes") or 0 for run in sweep.finals(row))
        score = mean(sweep.scores(row).values())
        dots.append(Dot(kept, score, f"{NAMES[row]} {score:.2f}", ORANGE if softmax else BLUE))
    ticks = [(10 * 2**10, "10 KiB"), (100 * 2**10, "100 KiB"), (2**20, "1 MiB"), (10 * 2**20, "10 MiB")]
    x, y = f"memory of a stream after {ladder['context']:,} tokens", "bits per byte, lower is better"
    return _scatter(dots, ticks, [1.9, 2.0, 2.1, 2.2], x, y)


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
        for j, (size, found) in enumerate(record["tables"].items()):
            ratio, length = found[row]["ratio_to_fused"], int(re.findall(r"T=(\d+)", size)[0])
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
    "quality_state": draw_quality_against_state,
    "quality": draw_differences_from_attention,
    "speed": draw_training_speed,
    "growth_tokens": partial(draw_growth, "tokens"),
    "growth_features": partial(draw_growth, "features"),
}
"""What draws each chart, by the name of its file."""


def on_page_content(content: str, **_: Any) -> str:
    """Put the charts of a page inline, without the colours that they have as files; mkdocs calls this."""
    return IMAGE.sub(lambda found: _inline(found[2], found[1]), content)


def _inline(name: str, alt: str) -> str:
    drawn = (FOLDER / f"{name}.svg").read_text().replace(STYLE, "").strip()
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1)


def _sweep() -> Results:
    found = measured_sweep("enwik8_modern")
    assert found is not None
    return found


def _scatter(dots: Sequence[Dot], x_ticks: list[tuple[float, str]], y_ticks: list[float], x: str, y: str) -> str:
    """Draw dots with their names on a logarithmic and a linear axis."""
    left, top, width, height = 40, 30, 470, 300
    low, high = (math.log(f(d.x for d in dots)) + pad for f, pad in ((min, -0.6), (max, 0.6)))
    down, up = (f(d.y for d in dots) + pad for f, pad in ((min, -0.04), (max, 0.04)))
    log_x = scale(low, high, left, left + width)
    at_y = scale(up, down, top, top + height)
    parts = [_text(6, 16, y), _text(left + width / 2, top + height + 40, x, "middle")]
    parts += [_line(left, at_y(v), left + width, at_y(v), faint=True) for v in y_ticks]
    parts += [_text(left - 8, at_y(v) + 5, f"{v:.1f}", "end") for v in y_ticks]
    parts += [_line(log_x(math.log(v)), top, log_x(math.log(v)), top + height, faint=True) for v, _ in x_ticks]
    parts += [_text(log_x(math.log(v)), top + height + 19, said, "middle") for v, said in x_ticks]
    parts += [_line(left, top, left, top + height), _line(left, top + height, left + width, top + height)]
    points = [(log_x(math.log(dot.x)), at_y(dot.y)) for dot in dots]
    boxes = place_names(points, [dot.name for dot in dots], 15, (left, top, left + width, top + height))
    for dot, (px, py), box in zip(dots, points, boxes, strict=True):
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="6" fill="{dot.colour}"/>']
        anchor = "start" if box[0] > px else "end" if box[2] < px else "middle"
        x0 = {"start": box[0], "end": box[2], "middle": (box[0] + box[2]) / 2}[anchor]
        parts += [_text(x0, box[3] - 5, dot.name, anchor)]
    return _svg(WIDTH, top + height + 52, parts)


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the linear map that takes ``low`` to ``start`` and ``high`` to ``end``."""
    return lambda value: start + (end - start) * (value - low) / (high - low)


def place_names(points: Sequence[tuple[float, float]], names: Sequence[str], font: float, room: Box) -> list[Box]:
    """Find a place beside each point for its name, in which it covers no other name and no point.

    Raises:
        ValueError: if there is none for a name.
    """
    taken: list[Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in points]
    placed = []
    for (x, y), name in zip(points, names, strict=True):
        wide, high = LETTER * font * len(name), LINE * font
        places = [(x + 11, y - high / 2), (x - 11 - wide, y - high / 2), (x - wide / 2, y + 9)]
        places += [(x - wide / 2, y - 9 - high), (x + 9, y + 5), (x + 9, y - 5 - high)]
        places += [(x - 9 - wide, y + 5), (x - 9 - wide, y - 5 - high)]
        boxes = [(left, top, left + wide, top + high) for left, top in places]
        free = [b for b in boxes if _inside(b, room) and not any(_overlap(b, other) for other in taken)]
        if not free:
            raise ValueError(f"chart: there is no room for the name {name!r}.")
        placed.append(free[0])
        taken.append(free[0])
    return placed


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
