"""Pictures of an anatomy: norms by layer, similarity at the embedding, where tokens look, objects with their boxes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..report.figures import COLOURS, Picture, render_both
from ..report.image_grid import as_shown, image_grid
from ..report.image_pictures import draw_norms, similarity_picture
from ..report.maps import spread
from .looks import Look
from .lost import Found
from .measure import Anatomy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BINS = 40
TICKS = 12  # most labelled layers


def norm_pictures(anatomy: Anatomy) -> list[Picture]:
    """Draw the norms of tokens by layer, their distributions and their maps."""
    norms, outliers, names = anatomy.reading.norms, anatomy.outliers, anatomy.subject.prefix
    patches = norms.patches.flatten(1).sort(1).values
    at = [round(q * (patches.shape[1] - 1)) for q in (0.5, 0.99, 1.0)]
    lines = dict(
        zip(("patches, median", "patches, 99th percentile", "patches, largest"), patches[:, at].mT, strict=True)
    )
    registers = [i for i, name in enumerate(names) if name.startswith("register")]
    lines |= {name: norms.prefix[:, :, i].mean(1) for i, name in enumerate(names) if i not in registers}
    if registers:
        lines["registers, mean"] = norms.prefix[:, :, registers].mean((1, 2))
    ends = "; ".join(f"{name}: {float(line[-1]):.3g} after the last layer" for name, line in lines.items())
    by_layer = Picture(
        *render_both(partial(_draw_layers, lines=lines, cutoff=outliers.cutoff), (6.4, 3.6)),
        alt=f"Line chart of norms of tokens by layer. {ends}.",
        caption="Norms of tokens before the first layer and after each; the dashed line is the cutoff.",
    )
    shown = anatomy.images.pixels, anatomy.images.names
    return [by_layer, *draw_norms(norms, *shown, outliers.cutoff, outliers.rule)]


def redundancy_pictures(anatomy: Anatomy) -> list[Picture]:
    """Draw how similar outliers and other patches are to their neighbours at the embedding, and maps of it."""
    alike, mask = anatomy.redundancy.similarity, anatomy.outliers.mask
    if not bool(alike.isfinite().any()):
        return []
    parts = {"other patches": alike[~mask], "outliers": alike[mask]}
    parts = {name: values for name, values in parts.items() if values.numel()}
    said = "; ".join(f"{name}: mean {float(values.mean()):.3f}" for name, values in parts.items())
    histogram = Picture(
        *render_both(partial(_draw_similarities, parts=parts), (6.4, 3.6)),
        alt=f"Histogram of the cosine similarity of patches with their neighbours. {said}.",
        caption=f"Cosine similarity of each patch with its 4 neighbours right after the patch embedding. {said}.",
    )
    n = anatomy.n_drawn
    return [histogram, similarity_picture(alike[:n], anatomy.images.pixels[:n], anatomy.images.names[:n])]


def look_pictures(anatomy: Anatomy) -> list[Picture]:
    """Draw where tokens look in the last layer: a row per token, a column per image."""
    n, looks = anatomy.n_drawn, anatomy.looks
    images, names = anatomy.images.pixels[:n], anatomy.images.names[:n]
    cells: list[list[Tensor]] = [[as_shown(image) for image in images]]
    cells += [[each / each.max().clamp_min(1e-30) for each in look.maps] for look in looks]
    said = "; ".join(f"{look.name}: {_smooth(look)}" for look in looks)
    return [
        image_grid(
            cells,
            rows=["image", *(look.name.replace(" of ", "\nof ") for look in looks)],
            columns=[name[:14] for name in names],
            bar="weight, of the map's largest",
            alt=f"A row per token and a column per image: the weights of the patches in the last layer. {said}.",
            caption=f"How much each token reads of each patch in the last layer, the mean over heads. {said}.",
            about_zero=False,
        )
    ]


def object_pictures(anatomy: Anatomy) -> list[Picture]:
    """Draw the objects: the image with the box, and the degrees with the patches that were found."""
    n = anatomy.n_drawn
    drawn = partial(_draw_objects, images=anatomy.images.pixels[:n], objects=anatomy.objects, side=anatomy.subject.side)
    boxes = "; ".join(
        f"{name}: rows {f.box[0]} to {f.box[2] - 1}, columns {f.box[1]} to {f.box[3] - 1}"
        for name, f in zip(anatomy.images.names, anatomy.objects, strict=False)
    )
    rows, columns = anatomy.subject.grid
    return [
        Picture(
            *render_both(drawn, (max(2.0, 1.45 * n), max(1.5, 2.9 * rows / columns))),
            alt=f"Images with the box of the object found in each, and below the degrees of the patches. {boxes}.",
            caption="Top: the box around the patches that were found; the cross is the seed. Bottom: how many patches "
            f"each patch resembles, dark for few; the patches of the object are framed. Boxes in patches: {boxes}.",
        )
    ]


def _smooth(look: Look) -> str:
    smooth = "constant" if look.smooth is None else f"Moran's I {look.smooth:.2f}"
    return smooth if look.on_outliers is None else f"{smooth}, {100 * look.on_outliers:.1f} % on outliers"


def _draw_layers(ax: Axes, lines: dict[str, Tensor], cutoff: float) -> None:
    for (name, line), colour in zip(lines.items(), COLOURS, strict=False):
        ax.plot(range(len(line)), line.tolist(), "o-", color=colour, markersize=3, linewidth=1.6, label=name)
    values = torch.stack(list(lines.values()))
    ax.axhline(cutoff, color=ax.xaxis.label.get_color(), linestyle="--", linewidth=1)
    if float(values.min()) > 0 and float(values.max()) > 30 * float(values.min()):
        ax.set_yscale("log")
    at = spread(range(values.shape[1]), TICKS)
    ax.set_xticks(at, ["before" if i == 0 else str(i - 1) for i in at])
    ax.set_xlabel("after layer")
    ax.set_ylabel("norm")
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.legend(frameon=False, labelcolor="linecolor", fontsize=8)


def _draw_similarities(ax: Axes, parts: dict[str, Tensor]) -> None:
    edges = torch.linspace(-1, 1, 2 * BINS + 1, dtype=torch.float64)
    low = min(float(values.min()) for values in parts.values())
    for (name, values), colour in zip(parts.items(), COLOURS, strict=False):
        counts = torch.bucketize(values.double().cpu(), edges[1:-1]).bincount(minlength=2 * BINS)
        shares = (counts / counts.sum()).tolist()
        ax.stairs(shares, edges.tolist(), color=colour, linewidth=1.6, label=name)
    ax.set_xlim(max(-1.0, low - 0.05), 1.0)
    ax.set_xlabel("cosine similarity with the 4 neighbours")
    ax.set_ylabel("share of patches")
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.legend(frameon=False, labelcolor="linecolor", fontsize=9)


def _draw_objects(ax: Axes, images: Tensor, objects: Sequence[Found], side: tuple[int, int]) -> None:
    """Place images in a row and degrees below, in units of patches."""
    from matplotlib.patches import Rectangle

    rows, columns = objects[0].mask.shape
    wide, tall = columns * 1.08, rows * 1.08
    for j, (image, found) in enumerate(zip(images, objects, strict=True)):
        left = j * wide
        ax.imshow(as_shown(image).permute(1, 2, 0).numpy(), extent=(left, left + columns, rows, 0))
        low = tall
        ax.imshow(found.degrees.numpy(), cmap="viridis", extent=(left, left + columns, low + rows, low))
        top, first, bottom, last = found.box
        ax.add_patch(
            Rectangle((left + first, top), last - first, bottom - top, fill=False, edgecolor="#ff3b30", linewidth=2)
        )
        y, x = found.seed
        ax.plot(left + x + 0.5, y + 0.5, "x", color="#ff3b30", markersize=6, markeredgewidth=2)
        for y, x in found.mask.nonzero().tolist():
            ax.add_patch(Rectangle((left + x, low + y), 1, 1, fill=False, edgecolor="#ff3b30", linewidth=0.8))
    ax.set_xlim(0, len(objects) * wide)
    ax.set_ylim(2 * tall, 0)
    ax.set_axis_off()
