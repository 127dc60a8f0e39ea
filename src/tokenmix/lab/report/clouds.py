"""Pictures of point clouds: what a classifier takes them for, and the parts that a segmenter finds beside the truth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError
from ...models import PointClassifier, PointSegmenter
from ..data.points import Cloud, PointSet, open_points, stack_clouds
from .figures import COLOURS, Picture, render_both
from .runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SHOWN = 10  # clouds in a picture
TURN, TILT = math.radians(35), math.radians(22)  # from where a cloud is looked at
COLUMNS = 5


class Cell(NamedTuple):
    """One cloud of a picture: its points (N, 3), the colour of each, and a line above it."""

    points: Tensor
    colours: list[str]
    title: str


def cloud_pictures(run: Run, model: PointClassifier | PointSegmenter) -> list[Picture]:
    """Draw clouds of the validation split as a run's model sees them; nothing where they can no longer be opened.

    A segmenter's clouds are coloured by part, in truth and as predicted; a classifier's by whether it is right.
    """
    data = run.config["data"]
    names = ("valid", "layout", "clouds", "held_out")
    try:
        found = open_points(data["source"], **{name: data[name] for name in names if name in data})
        clouds = _first_of_each(found, int(data.get("points", 1024)))
    except MixerError:
        return []
    points, category, _ = stack_clouds(clouds)
    with torch.no_grad():
        logits = model(points, category) if found.parts and hasattr(model.config, "parts") else model(points)
    if logits.ndim == 3:
        return [_parts_picture(run.name, found, clouds, logits)]
    return [_classes_picture(run.name, found, clouds, logits)]


def _first_of_each(data: PointSet, n: int) -> list[Cloud]:
    """Return the first clouds of the validation split, one of each class before any class has a second."""
    seen: dict[int, int] = {}
    clouds: list[tuple[int, int, Cloud]] = []
    for cloud in data.held_out("valid", n, limit=100):
        seen[cloud.category] = seen.get(cloud.category, 0) + 1
        clouds.append((seen[cloud.category], len(clouds), cloud))
    return [cloud for *_, cloud in sorted(clouds, key=lambda each: each[:2])[:SHOWN]]


def _classes_picture(name: str, data: PointSet, clouds: list[Cloud], logits: Tensor) -> Picture:
    cells, said = [], []
    for cloud, guess in zip(clouds, logits.argmax(-1).tolist(), strict=True):
        right, truth = guess == cloud.category, data.classes[cloud.category]
        title = truth if right else f"{truth}, taken for {data.classes[guess]}"
        cells.append(Cell(cloud.points, [COLOURS[0] if right else COLOURS[1]] * len(cloud.points), title))
        said.append(title)
    rows = [cells[i : i + COLUMNS] for i in range(0, len(cells), COLUMNS)]
    what = "Clouds of the validation split: blue where the class is right, orange where it is not."
    return _picture(rows, alt=f"Point clouds classified by {name}: {'; '.join(said)}.", caption=what)


def _parts_picture(name: str, data: PointSet, clouds: list[Cloud], logits: Tensor) -> Picture:
    truths: list[Cell] = []
    guesses: list[Cell] = []
    said = []
    for cloud, each in zip(clouds[:COLUMNS], logits, strict=False):
        parts = data.parts[cloud.category]
        guess = torch.tensor(parts)[each[:, list(parts)].argmax(-1)]
        share = float((guess == cloud.parts).double().mean())
        for cells, labels, title in (
            (truths, cloud.parts, f"{data.classes[cloud.category]}, truth"),
            (guesses, guess, f"predicted, {100 * share:.0f} % right"),
        ):
            cells.append(Cell(cloud.points, [_colour(label - parts[0]) for label in labels.tolist()], title))
        said.append(f"{data.classes[cloud.category]} {100 * share:.0f} % of points right")
    what = "Clouds of the validation split, a colour for each part of a category: top the truth, below the prediction."
    return _picture([truths, guesses], alt=f"Parts of clouds found by {name}: {'; '.join(said)}.", caption=what)


def _colour(part: int) -> str:
    return COLOURS[part % len(COLOURS)]


def _picture(rows: list[list[Cell]], *, alt: str, caption: str) -> Picture:
    """Draw rows of clouds, looked at from the side and a little from above."""

    def draw(ax: Axes) -> None:
        ink = ax.xaxis.label.get_color()
        for i, row in enumerate(rows):
            for j, cell in enumerate(row):
                x, y, depth = project_points(cell.points)
                order = depth.argsort(descending=True).tolist()  # the far ones first
                ax.scatter(
                    [float(x[k]) + 2.2 * j for k in order],
                    [float(y[k]) - 2.6 * i for k in order],
                    c=[cell.colours[k] for k in order],
                    s=5,
                    linewidths=0,
                )
                ax.text(2.2 * j, 1.12 - 2.6 * i, cell.title, ha="center", va="bottom", fontsize=8, color=ink)
        ax.set_aspect("equal")
        ax.set_xlim(-1.1, 2.2 * max(map(len, rows)) - 1.1)
        ax.set_ylim(-2.6 * len(rows) + 1.4, 1.5)
        ax.set_xticks([])
        ax.set_yticks([])
        for spine in ax.spines.values():
            spine.set_visible(False)

    return Picture(*render_both(draw, (1.9 * max(map(len, rows)), 2.25 * len(rows))), alt=alt, caption=caption)


def project_points(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where points (N, 3) appear, across and up, and how far away they are; z is up."""
    x, y, z = points.unbind(-1)
    across = x * math.cos(TURN) + y * math.sin(TURN)
    away = y * math.cos(TURN) - x * math.sin(TURN)
    return across, z * math.cos(TILT) + away * math.sin(TILT), away * math.cos(TILT) - z * math.sin(TILT)
