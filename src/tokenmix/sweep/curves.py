"""Draw the scores of a sweep's final runs over tokens and over training time."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from .results import Results


def draw_curves(results: Results, path: Path) -> None:
    """Draw one line per row, the mean over its seeds, with their range; nothing if no final run has ended."""
    rows = {row: [r for r in results.of("final", row) if r["curve"]] for row in results.plan.rows}
    rows = {row: runs for row, runs in rows.items() if runs}
    if not rows:
        return
    metric = next(iter(rows.values()))[0]["metric"].replace("_", " ")
    figure = Figure(figsize=(11, 4.5), dpi=130, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, column, label in zip(axes, (0, 2), ("tokens seen", "training time in s"), strict=True):
        for i, (row, runs) in enumerate(rows.items()):
            shared = min(len(r["curve"]) for r in runs)
            points = [[r["curve"][k] for r in runs] for k in range(shared)]
            points = [p for p in points if all(each[column] is not None for each in p)]
            x = [mean(each[column] for each in p) for p in points]
            ax.plot(x, [mean(each[1] for each in p) for p in points], label=row, color=f"C{i % 10}", linewidth=1.5)
            low, high = ([pick(each[1] for each in p) for p in points] for pick in (min, max))
            ax.fill_between(x, low, high, color=f"C{i % 10}", alpha=0.2, linewidth=0)
        for name, value in results.yardsticks.items():
            ax.axhline(value, color="0.5", linestyle=":", linewidth=1, label=name if column == 0 else None)
        ax.set_xlabel(label)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"{metric} on validation")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)
