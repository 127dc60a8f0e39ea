"""A grid of many small maps in one picture, on one colour scale, with images beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .figures import Picture, colour_range, render_both

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable


PIXELS = 56  # of a cell's longer side, at least: small filters are enlarged by whole factors
GAP = 0.1  # between cells, relative to a cell
TALLEST = 4.0  # inches of the colour bar

Cell = Tensor | None


def image_grid(
    cells: Sequence[Sequence[Cell]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    bar: str,
    alt: str,
    caption: str,
    about_zero: bool = True,
    title: str = "",
    marks: Sequence[tuple[int, int]] | None = None,
) -> Picture:
    """Draw a table of maps (H, W), images (3, H, W) and gaps (None), with row and column names and one colour bar.

    Args:
        bar: what the colours mean.
        about_zero: colours on both sides of 0, white at 0; otherwise from the lowest value to the highest, for values
            without a natural zero.
        marks: the row and column of a point to mark in the maps of each column.
    """
    values = torch.cat([c.flatten().cpu() for row in cells for c in row if c is not None and c.ndim == 2])
    low, high, beyond = colour_range(values) if about_zero else _span(values)
    size = _cell_size([c.shape for row in cells for c in row if c is not None and c.ndim == 2])
    inches = _inches(size, rows, columns, title)

    def draw(ax: Axes) -> None:
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        colours = ScalarMappable(
            Normalize(-high if about_zero else low, high), colormaps["RdBu_r" if about_zero else "viridis"]
        )
        ax.imshow(_mosaic(ax, cells, size, colours, marks).numpy(), interpolation="nearest", aspect="auto")
        ax.set_position(inches.share(inches.left, inches.bottom, inches.across, inches.down))
        _label(ax, rows, columns, size, title)
        _colour_bar(ax, colours, (low, high), beyond, bar, inches)

    return Picture(*render_both(draw, (inches.width, inches.height)), alt=alt, caption=caption)


def _mosaic(
    ax: Axes,
    cells: Sequence[Sequence[Cell]],
    size: tuple[int, int],
    colours: ScalarMappable,
    marks: Sequence[tuple[int, int]] | None,
) -> Tensor:
    """Return all cells as one image (H, W, 4), clear between them; frames and marks are drawn on the axes."""
    (height, width), gap = size, _gap(size)
    mosaic = torch.zeros(len(cells) * (height + gap) - gap, len(cells[0]) * (width + gap) - gap, 4)
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            if cell is not None:
                top, left = i * (height + gap), j * (width + gap)
                mosaic[top : top + height, left : left + width] = _pixels(cell, size, colours)
                _frame(ax, left, top, width, height)
                if marks is not None:
                    y, x = (
                        (at + 0.5) * full / n - 0.5 for at, full, n in zip(marks[j], size, cell.shape[-2:], strict=True)
                    )
                    ax.plot(
                        left + x, top + y, "o", color="black", markerfacecolor="none", markersize=5, markeredgewidth=1
                    )
    return mosaic


def _span(values: Tensor) -> tuple[float, float, str]:
    """Return the range of 98 % of the values, and matplotlib's ``extend``; a constant gets a range around it."""
    known = values[values.isfinite()].double()
    low, high = (float(known.quantile(q)) for q in (0.01, 0.99)) if known.numel() else (0.0, 1.0)
    if not high > low:
        return low - 0.5, high + 0.5, "neither"
    ends = bool((known < low).any()), bool((known > high).any())
    return (
        low,
        high,
        {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[ends],
    )


def _cell_size(shapes: list[torch.Size]) -> tuple[int, int]:
    """Return the pixels of a cell: the largest map, enlarged by a whole factor."""
    height, width = (max(s[axis] for s in shapes) for axis in (0, 1))
    times = -(-PIXELS // max(height, width))
    return height * times, width * times


def _pixels(cell: Tensor, size: tuple[int, int], colours: ScalarMappable) -> Tensor:
    """Convert a map or an image to colours (H, W, 4); values that are not finite stay clear."""
    if cell.ndim == 2:
        grown = F.interpolate(cell[None, None].double().cpu(), size, mode="nearest-exact")[0, 0]
        rgba = torch.as_tensor(colours.to_rgba(grown.nan_to_num(0.0).numpy())).float()
        rgba[..., 3] = grown.isfinite().float()
        return rgba
    shown = F.interpolate(cell[None].float().cpu(), size, mode="bilinear", antialias=True)[0].clamp(0, 1)
    return torch.cat([shown, torch.ones_like(shown[:1])]).permute(1, 2, 0)


def as_shown(image: Tensor, least: Tensor | None = None, most: Tensor | None = None) -> Tensor:
    """Scale a normalised image (C, H, W) to (3, H, W) in 0..1 by its own range, or by that from least to most.

    Other than three channels are shown as their mean in grey.
    """
    image = image.detach().float().cpu()
    low, high = float(image.min() if least is None else least), float(image.max() if most is None else most)
    image = ((image - low) / max(high - low, 1e-12)).clamp(0, 1)
    return image if image.shape[0] == 3 else image.mean(0, keepdim=True).expand(3, -1, -1)


def _gap(size: tuple[int, int]) -> int:
    return max(2, round(GAP * max(size)))


def _frame(ax: Axes, left: int, top: int, width: int, height: int) -> None:
    from matplotlib.patches import Rectangle

    ink = ax.xaxis.label.get_color()
    ax.add_patch(
        Rectangle(
            (left - 0.5, top - 0.5), width, height, fill=False, edgecolor=ink, linewidth=0.5, alpha=0.5, clip_on=False
        )
    )


def _label(ax: Axes, rows: Sequence[str], columns: Sequence[str], size: tuple[int, int], title: str) -> None:
    (height, width), gap = size, _gap(size)
    font = 9 if len(columns) <= 10 else 8
    ax.xaxis.tick_top()
    ax.set_xticks([j * (width + gap) + width / 2 for j in range(len(columns))], columns, fontsize=font)
    ax.set_yticks([i * (height + gap) + height / 2 for i in range(len(rows))], rows, fontsize=font)
    ax.tick_params(length=0, pad=3)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if title:
        ax.set_title(title, color=ax.xaxis.label.get_color(), fontsize=11)


def _colour_bar(
    ax: Axes, colours: ScalarMappable, ends: tuple[float, float], beyond: str, label: str, inches: Inches
) -> None:
    ink, tall = ax.xaxis.label.get_color(), min(inches.down, TALLEST)
    place = ax.figure.add_axes(
        inches.share(inches.left + inches.across + 0.15, inches.bottom + (inches.down - tall) / 2, 0.13, tall)
    )
    bar = ax.figure.colorbar(colours, cax=place, extend=beyond, extendfrac=0.04)
    bar.ax.set_ylim(*ends)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=ink, labelsize=8)
    bar.set_label(label, color=ink, fontsize=9)


class Inches(NamedTuple):
    """Where the cells stand: margins to the left and below, their extent, and the size of the whole picture."""

    left: float
    bottom: float
    across: float
    down: float
    width: float
    height: float

    def share(self, left: float, bottom: float, across: float, down: float) -> tuple[float, float, float, float]:
        """The same lengths as shares of the picture, as matplotlib takes them."""
        return left / self.width, bottom / self.height, across / self.width, down / self.height


def _inches(size: tuple[int, int], rows: Sequence[str], columns: Sequence[str], title: str) -> Inches:
    """Choose a width that a page can show, cells neither tiny nor huge, and room for every name."""
    aspect, gap = size[0] / size[1], _gap(size) / size[1]
    side = min(1.5, max(0.62, min(7.0 / len(columns), 8.5 / (len(rows) * aspect))))
    across, down = (len(columns) * (1 + gap) - gap) * side, (len(rows) * (aspect + gap) - gap) * side
    longest = max(len(part) for name in rows for part in name.split("\n"))
    lines = max(name.count("\n") + 1 for name in columns)
    left, top = 0.15 + 0.075 * longest, 0.15 + 0.15 * lines + (0.25 if title else 0)
    return Inches(left, 0.12, across, down, left + across + 1.15, 0.12 + down + top)
