"""The learned weights of mixtures: how much each kind of logits counts in each layer, or head, of a model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from ...contrib.synthesizer_mixture import PARTS
from ...models.blocks import Block
from ...system.text import Table
from .figures import COLOURS, Picture, render_both

if TYPE_CHECKING:
    from matplotlib.axes import Axes


ENCODER, DECODER, CROSS, LAYERS = "encoder", "decoder", "decoder to source", "layers"
READABLE = 0.09
"""Weight from which on its number is written into the bar."""
COLUMNS = 3  # of the legend
LIGHT = COLOURS[3:6]  # colours on which numbers are black


class Mixture(NamedTuple):
    """The weights of one mixer, or of one of its heads.

    Attributes:
        place: "encoder", "decoder", "decoder to source", or "layers" where a model has but one place.
        layer: its number there, from 0.
        weights: by part.
        head: its number, from 0, where each head has its own weights; None where all heads of the layer share them.
    """

    place: str
    layer: int
    weights: dict[str, float]
    head: int | None = None

    def name(self) -> str:
        """Return the layer, with the head if it has one."""
        return str(self.layer) if self.head is None else f"{self.layer}, head {self.head}"


def mixtures(model: nn.Module) -> list[Mixture]:
    """Return the learned weights of all mixers of a model that mix parts, place by place; empty if there are none."""
    two: bool = hasattr(model, "encoder")
    found: list[tuple[str, int, object]] = []
    blocks = [(name.startswith("encoder."), block) for name, block in model.named_modules() if isinstance(block, Block)]
    for reads in (True, False):
        there = [block for inside, block in blocks if inside is reads]
        place = ENCODER if reads else DECODER if two else LAYERS
        found += [(place, layer, block.mixer) for layer, block in enumerate(there)]
        if not reads:
            found += [(CROSS, layer, block.cross) for layer, block in enumerate(there) if hasattr(block, "cross")]
    return [
        Mixture(place, layer, weights, head if len(heads) > 1 else None)
        for place, layer, mixer in found
        for heads in [_weights(mixer)]
        for head, weights in enumerate(heads)
    ]


def _weights(mixer: object) -> list[dict[str, float]]:
    asked = getattr(mixer, "part_weights", None)
    return (asked() if callable(asked) else None) or []


def mixture_pictures(name: str, found: list[Mixture]) -> list[Picture]:
    """Draw the weights of a run, one picture for each place: a bar for each layer or head, divided into its parts."""
    places = dict.fromkeys(each.place for each in found)
    return [_picture(name, place, [each for each in found if each.place == place]) for place in places]


def _parts(found: list[Mixture]) -> list[str]:
    """Return the parts that occur, in one order for all runs."""
    there = dict.fromkeys(part for each in found for part in each.weights)
    return [*(part for part in PARTS if part in there), *(part for part in there if part not in PARTS)]


def _picture(name: str, place: str, found: list[Mixture]) -> Picture:
    parts = _parts(found)
    where = name if place == LAYERS else f"{name}, {place}"
    said = "; ".join(
        f"layer {each.name()}: " + ", ".join(f"{part} {a:.2f}" for part, a in each.weights.items()) for each in found
    )
    draw = partial(_draw, title=where, found=found, parts=parts)
    return Picture(
        *render_both(draw, (4.6, 1.3 + 0.2 * -(-len(parts) // COLUMNS) + 0.34 * len(found))),
        alt=f"Bars of the weights of each part of the mixtures of {where}. {said}.",
        caption=f"{where}: the weight of each part of the logits"
        + (", which the heads of a layer share." if all(each.head is None for each in found) else " in each head."),
    )


def _draw(ax: Axes, title: str, found: list[Mixture], parts: list[str]) -> None:
    ink = ax.xaxis.label.get_color()
    for i, part in enumerate(parts):
        rows = [row for row, each in enumerate(found) if part in each.weights]
        widths = [found[row].weights[part] for row in rows]
        before = [sum(found[row].weights.get(other, 0.0) for other in parts[:i]) for row in rows]
        colour = COLOURS[(PARTS.index(part) if part in PARTS else i) % len(COLOURS)]
        ax.barh(rows, widths, 0.72, left=before, color=colour, label=part.replace("_", " "))
        written = "black" if colour in LIGHT else "white"
        for row, width, left in zip(rows, widths, before, strict=True):
            if width >= READABLE:
                ax.text(left + width / 2, row, f"{width:.2f}", ha="center", va="center", color=written, fontsize=8)
    ax.set_yticks(range(len(found)), [each.name() for each in found])
    ax.invert_yaxis()
    ax.set_xlim(0, max(1.0, *(sum(each.weights.values()) for each in found)))
    ax.set_xlabel("weight")
    ax.set_ylabel("layer")
    ax.set_title(title, color=ink, fontsize=11)
    ax.figure.legend(
        frameon=False, labelcolor=ink, fontsize=9, ncols=min(COLUMNS, len(parts)), loc="outside lower center"
    )


def mixture_table(runs: list[tuple[str, list[Mixture]]]) -> Table | None:
    """Build the table of all weights, one row per layer, or head; None where no run has any."""
    parts = _parts([each for _, found in runs for each in found])
    if not parts:
        return None
    rows = [
        [run, each.place, each.name(), *(f"{each.weights[p]:.4f}" if p in each.weights else "-" for p in parts)]
        for run, found in runs
        for each in found
    ]
    return Table("Weights of mixtures", ["run", "place", "layer", *parts], rows)
