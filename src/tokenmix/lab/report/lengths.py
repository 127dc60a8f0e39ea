"""How far beyond the sizes of its training a model is still right: a map for each run, or one chart for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .figures import COLOURS, STYLES, Picture, render_both
from .runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Cells = list[tuple[tuple[int, ...], float]]


def length_pictures(runs: list[Run]) -> list[Picture]:
    """Draw the share of exact answers by size, as `tokenmix eval --lengths` last scored it, for runs that have it."""
    scored = [(run, *found) for run in runs if (found := _cells(run)) is not None]
    lines = [(run, names, cells) for run, names, cells in scored if len(names) == 1]
    maps = [_map(run, names, cells) for run, names, cells in scored if len(names) == 2]
    return maps + ([_lines(lines)] if lines else [])


def _cells(run: Run) -> tuple[list[str], Cells] | None:
    """Return the names of the sizes and the share of exact answers for each combination, from the last grid."""
    for line in reversed(run.evals):
        names, grid = line.get("names"), line.get("grid")
        if isinstance(names, list) and isinstance(grid, list) and len(names) in (1, 2):
            try:
                return names, [(tuple(int(n) for n in cell["sizes"]), float(cell["exact"])) for cell in grid]
            except (KeyError, TypeError, ValueError):
                continue
    return None


def _trained_length(run: Run) -> int:
    longest = run.config.get("data", {}).get("longest", 0)
    return longest if isinstance(longest, int) else 0


def _map(run: Run, names: list[str], cells: Cells) -> Picture:
    rows, columns = (sorted({sizes[i] for sizes, _ in cells}) for i in (0, 1))
    found, trained = dict(cells), _trained_length(run)
    shown = [[100 * found.get((r, c), float("nan")) for c in columns] for r in rows]
    inside = [sum(n <= trained for n in axis) for axis in (columns, rows)]

    def draw(ax: Axes) -> None:
        colour = ax.xaxis.label.get_color()
        image = ax.imshow(shown, cmap="viridis", vmin=0, vmax=100, origin="lower", interpolation="nearest")
        bar = ax.figure.colorbar(image, ax=ax, fraction=0.046)
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=colour)
        for axis, sizes in ((ax.xaxis, columns), (ax.yaxis, rows)):
            step = max(1, len(sizes) // 12)
            axis.set_ticks(range(0, len(sizes), step), [str(n) for n in sizes[::step]])
        if all(inside):
            ax.plot([-0.5, inside[0] - 0.5, inside[0] - 0.5], [inside[1] - 0.5, inside[1] - 0.5, -0.5], color="#ff5c33")
        ax.set_xlabel(names[1])
        ax.set_ylabel(names[0])
        ax.set_title(f"{run.name}: % exact", color=colour, fontsize=11)

    beyond = [share for sizes, share in cells if max(sizes) > trained]
    mean = f" Beyond them {100 * sum(beyond) / len(beyond):.1f} % are exact on average." if beyond else ""
    sizes = f"{names[0]} down, {names[1]} across"
    return Picture(
        *render_both(draw, (5.2, 4.4)),
        alt=f"Heat map of the share of exact answers of {run.name} by size, {sizes}.{mean}",
        caption=f"{run.name}: share of answers right throughout, by size. The line bounds the sizes of training.{mean}",
    )


def _lines(runs: list[tuple[Run, list[str], Cells]]) -> Picture:
    def draw(ax: Axes) -> None:
        for i, (run, _, cells) in enumerate(runs):
            points = sorted((sizes[0], 100 * share) for sizes, share in cells)
            colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
            ax.plot(*zip(*points, strict=True), f"o{style}", color=colour, markersize=4, label=run.name)
        for trained in {_trained_length(run) for run, _, _ in runs}:
            ax.axvline(trained, color=ax.xaxis.label.get_color(), linewidth=0.8, linestyle=":")
        ax.set_xlabel(" or ".join(dict.fromkeys(names[0] for _, names, _ in runs)))
        ax.set_ylabel("exact answers, %")
        ax.set_ylim(-3, 103)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.legend(frameon=False, labelcolor="linecolor", fontsize=10)

    said = "; ".join(
        f"{run.name} {100 * share:.0f} % at {sizes[0]}" for run, _, cells in runs for sizes, share in [max(cells)]
    )
    return Picture(
        *render_both(draw, (6.4, 4.2)),
        alt=f"Line chart of the share of exact answers by size. At the largest size: {said}.",
        caption="Share of answers right throughout, by size; the dotted line is the largest size of training.",
    )
