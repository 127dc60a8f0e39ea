"""Pictures of what a vision model looks at: the numbers of maps.py, attribution.py and norms.py with labels and
colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers.attention import Attention
from .attribution import Focus, focus, has_slots, slot_reads, slot_similarity
from .biases import filters, has_filters, has_pair_bias
from .figures import COLOURS, Picture, render_both
from .image_grid import as_shown, image_grid
from .maps import average_relative_attention, bias_around, check_vit, key_maps, sparsity, spread
from .norms import Norms, neighbour_similarity, outlier_cutoff, share_above, token_norms

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LAYERS, HEADS, IMAGES = 12, 12, 8


def filter_pictures(model: nn.Module) -> list[Picture]:
    """Draw exp(w) - 1 of every AFT-conv layer and head in one picture with one scale (AFT, Fig. 1).

    Filters on grids are drawn as they lie, one-dimensional ones as a row per head.
    """
    model = check_vit(model, "filter_pictures")
    extra = {i: filters(block.mixer) for i, block in enumerate(model.blocks) if has_filters(block.mixer)}
    return [
        *_filter_grid({i: e for i, e in extra.items() if e.ndim == 3}),
        *_filter_rows({i: e for i, e in extra.items() if e.ndim == 2}),
    ]


def _filter_grid(extra: dict[int, Tensor]) -> list[Picture]:
    if not extra:
        return []
    layers, heads = spread(sorted(extra), LAYERS), spread(range(max(len(e) for e in extra.values())), HEADS)
    cells = [[extra[i][h] if h < len(extra[i]) else None for h in heads] for i in layers]
    which = f"{_numbers('layer', layers)} and {_numbers('head', heads)}"
    what = f"exp(w) - 1 of the filters of {which}, {_range(extra.values())}"
    alt = f"A grid of small heat maps, a row per layer and a column per head: {what}."
    caption = f"{what}. The middle of each map is the query's own patch; all share one scale."
    return [
        image_grid(
            cells,
            rows=_number_labels("layer", layers),
            columns=_number_labels("head", heads),
            bar="exp(w) - 1",
            alt=alt,
            caption=caption,
        )
    ]


def _filter_rows(extra: dict[int, Tensor]) -> list[Picture]:
    if not extra:
        return []
    layers = spread(sorted(extra), LAYERS)
    what = f"exp(w) - 1 of the one-dimensional filters of {_numbers('layer', layers)}, {_range(extra.values())}"
    alt = f"Heat maps side by side, one per layer, a row per head and a column per tap: {what}."
    return [
        image_grid(
            [[extra[i] for i in layers]],
            rows=["heads"],
            columns=_number_labels("layer", layers),
            bar="exp(w) - 1",
            alt=alt,
            caption=f"{what}; a row per head, a column per tap, one scale.",
        )
    ]


def pair_bias_pictures(model: nn.Module) -> list[Picture]:
    """Draw exp(w) - 1 of AFT-full and AFT-local layers as maps around four query patches: a row per layer."""
    model = check_vit(model, "pair_bias_pictures")
    layers = spread([i for i, block in enumerate(model.blocks) if has_pair_bias(block.mixer)], LAYERS)
    if not layers:
        return []
    rows, columns = model.grid
    places = sorted({(rows * a // 4, columns * b // 4) for a, b in ((1, 1), (2, 2), (3, 3), (0, 0))})
    maps = {
        (i, p): bias_around(model.blocks[i].mixer, model.grid, model.config.prefix, p[0] * columns + p[1])
        for i in layers
        for p in places
    }
    what = f"exp(w) - 1 from one query patch to all patches, {_numbers('layer', layers)}, {_range(maps.values())}"
    alt = f"A grid of heat maps over the image, a row per layer and a column per query patch: {what}."
    names = [f"row {y}\ncolumn {x}" for y, x in places]
    caption = f"{what}; one scale. A ring marks the query; its row and column are given above."
    cells = [[maps[i, p] for p in places] for i in layers]
    return [
        image_grid(
            cells,
            rows=_number_labels("layer", layers),
            columns=names,
            bar="exp(w) - 1",
            alt=alt,
            caption=caption,
            marks=places,
        )
    ]


def key_pictures(model: nn.Module, images: Tensor, names: Sequence[str]) -> list[Picture]:
    """Draw keys as feature maps, a row per layer and a column per head or channel; at most two images."""
    if not any(getattr(block.mixer, "k_proj", None) is not None for block in check_vit(model, "key_pictures").blocks):
        return []
    found = key_maps(model, images[:2])
    layers = spread(sorted(found), LAYERS)
    most = max(found[i].shape[1] for i in layers)
    heads = spread(range(most), HEADS - 2)
    pictures = []
    for b, image in enumerate(images[:2]):
        centred = {i: found[i][b] - found[i][b].mean((1, 2), keepdim=True) for i in layers}
        spans = {i: float(centred[i].abs().max().clamp_min(1e-30)) for i in layers}
        cells = [
            [
                as_shown(image) if i == layers[0] else None,
                *(centred[i][h] / spans[i] if h < len(centred[i]) else None for h in heads),
            ]
            for i in layers
        ]
        what = f"keys of {_numbers('layer', layers)}, {names[b]}"
        alt = f"The image {names[b]} and heat maps of the keys over its patches, a row per layer and a column per key."
        caption = f"{what}: each less its mean over the patches, to which a softmax over tokens is invariant, "
        caption += f"divided by its layer's largest size (±, at the left). {_keys_are(model)}"
        labels = ["image", *_number_labels("key", heads)]
        rows = [f"layer {i}\n±{spans[i]:.2g}" for i in layers]
        pictures.append(
            image_grid(cells, rows=rows, columns=labels, bar="key, of the layer's largest", alt=alt, caption=caption)
        )
    return pictures


def _keys_are(model: Any) -> str:
    if any(getattr(block.mixer, "heads", 0) and not has_filters(block.mixer) for block in model.blocks):
        return "Where a head's key is a vector, its norm is shown."
    return (
        "One key per head."
        if all(has_filters(block.mixer) for block in model.blocks)
        else "One key per channel or head."
    )


def relative_attention_pictures(model: nn.Module, images: Tensor) -> list[Picture]:
    """Draw the mean attention of softmax layers by relative offset, a row per layer and a column per head (AFT, Fig.
    1).
    """
    if not any(isinstance(block.mixer, Attention) for block in check_vit(model, "relative_attention_pictures").blocks):
        return []
    layers, means, _ = average_relative_attention(model, images)
    shown, heads = spread(range(len(layers)), LAYERS), spread(range(means.shape[1]), HEADS)
    cells = [[means[i, h] for h in heads] for i in shown]
    where = _numbers("layer", [layers[i] for i in shown])
    alt = f"A grid of heat maps, a row per layer and a column per head, of the mean attention of {where} "
    alt += "at each relative offset between patches."
    caption = (
        f"Attention at each offset of key from query, the mean over all pairs of patches and {len(images)} images, "
    )
    caption += f"{where}; offset zero is in the middle."
    return [
        image_grid(
            cells,
            rows=[f"layer {layers[i]}" for i in shown],
            columns=_number_labels("head", heads),
            bar="mean attention",
            alt=alt,
            caption=caption,
            about_zero=False,
        )
    ]


def focus_pictures(model: nn.Module, images: Tensor, names: Sequence[str]) -> list[Picture]:
    """Draw where the predicted class is decided in the last layer, under each image.

    Nothing is drawn where the last layer is not a sum over values.
    """
    images = images[:IMAGES]
    try:
        scores: Focus = focus(model, images)
    except MixerError:
        return []
    maps = scores.patches / scores.patches.abs().amax((1, 2), keepdim=True).clamp_min(1e-30)
    classes = scores.classes.tolist()
    labels = [f"{_shorten_name(name)}\nclass {c}" for name, c in zip(names, classes, strict=False)]
    kind = type(model.blocks[-1].mixer).__name__  # type: ignore[index, union-attr]  # a ViT's blocks
    listed = ", ".join(f"{name}: class {c}" for name, c in zip(names, classes, strict=False))
    alt = "Images and below each a heat map of what each patch adds to the logit of the predicted class "
    alt += f"in the last layer ({kind}). {listed}."
    caption = "What each patch's value adds along the gradient of the predicted class's logit, "
    caption += f"last layer ({kind}); relative to the largest size in each image."
    cells = [[as_shown(image) for image in images], list(maps)]
    return [
        image_grid(cells, rows=["image", "focus"], columns=labels, bar="share of the largest", alt=alt, caption=caption)
    ]


def memory_pictures(model: nn.Module, images: Tensor, names: Sequence[str]) -> list[Picture]:
    """Draw which patches of the first image the most used slots read, and how similar the slots' directions are."""
    mixers = {i: b.mixer for i, b in enumerate(check_vit(model, "memory_pictures").blocks) if has_slots(b.mixer)}
    if not mixers:
        return []
    reads = {i: w[0].mean(0) for i, w in slot_reads(model, images[:1]).items()}  # (slots, H, W), the mean over heads
    layers = spread(sorted(reads), LAYERS)
    used = {i: reads[i].mean((1, 2)).argsort(descending=True)[: HEADS - 2] for i in layers}
    most = max(len(u) for u in used.values())
    cells: list = [
        [as_shown(images[0]) if i == layers[0] else None, *reads[i][used[i]], *[None] * (most - len(used[i]))]
        for i in layers
    ]
    alt = (
        f"The image {names[0]} and a grid of heat maps, a row per layer: how much each patch reads the most used slots."
    )
    caption = (
        f"Weights of the most used slots over {names[0]}, mean over heads, sorted by use, {_numbers('layer', layers)}."
    )
    columns = ["image", *(f"{_nth(j)}" for j in range(most))]
    first = image_grid(
        cells, rows=_number_labels("layer", layers), columns=columns, bar="weight", alt=alt, caption=caption
    )
    alike = [[slot_similarity(mixers[i]) for i in layers]]
    what = f"Cosine similarity between the directions that slots write, {_numbers('layer', layers)}"
    alt = f"Heat maps side by side, one per layer, slots against slots. {what}."
    caption = f"{what}; slots with a cosine of 1 would be copies."
    return [
        first,
        image_grid(
            alike, rows=["slots"], columns=_number_labels("layer", layers), bar="cosine", alt=alt, caption=caption
        ),
    ]


def norm_pictures(model: nn.Module, images: Tensor, names: Sequence[str]) -> list[Picture]:
    """Draw token norms: their distribution by layer, their maps, and how similar each patch is to its neighbours."""
    norms = token_norms(model, images)
    rule = "the upper quartile plus three times the interquartile range"
    pictures = draw_norms(norms, images, names, outlier_cutoff(norms.patches[-1]), rule)
    if norms.patches[0, 0].numel() > 1:
        alike = neighbour_similarity(model, images[:IMAGES])
        pictures.append(similarity_picture(alike, images[:IMAGES], names))
    return pictures


def draw_norms(norms: Norms, images: Tensor, names: Sequence[str], cutoff: float, rule: str) -> list[Picture]:
    """Draw the distribution of norms of patches by layer, and maps of at most four images.

    Args:
        rule: what the cutoff is, in words.
    """
    above = share_above(norms.patches, cutoff)
    layers, count = spread(range(len(norms.patches)), 6), norms.patches.shape[1]
    labels = ["before" if i == 0 else f"layer {i - 1}" for i in layers]
    said = f"{100 * float(above[-1]):.2f} % of the patches after the last layer lie above {cutoff:.3g}"
    others = ", ".join(f"{float(n):.3g}" for n in norms.prefix[-1].mean(0))
    alt = f"Line chart of the distribution of the norms of patches after some layers, {count} images. {said}."
    caption = f"Norms of patches before the first block and after some, {count} images. {said}, {rule}."
    caption += f" Class token and registers there: {others}." if others else ""
    drawn = partial(_draw_histogram, norms=[norms.patches[i].flatten() for i in layers], labels=labels, cutoff=cutoff)
    pictures = [Picture(*render_both(drawn, (6.4, 3.6)), alt=alt, caption=caption)]
    shown = range(min(4, len(images)))
    cells = [[as_shown(images[b]), *(norms.patches[i, b] for i in layers)] for b in shown]
    alt = "A row per image: the image and heat maps of its patches' norms before the first block and after some."
    caption = "Norms of the patches of each image; one scale. Registers exist to remove patches that are much brighter "
    caption += "than the rest in smooth regions."
    rows = [_shorten_name(names[b]) for b in shown]
    pictures.append(
        image_grid(cells, rows=rows, columns=["image", *labels], bar="norm", alt=alt, caption=caption, about_zero=False)
    )
    return pictures


def similarity_picture(alike: Tensor, images: Tensor, names: Sequence[str]) -> Picture:
    """Draw how similar each patch is to its neighbours (B, H, W), below each image."""
    alt = "Images and below each a heat map of each patch's cosine similarity with its neighbours after the embedding."
    caption = "Cosine similarity of each patch with its neighbours right after the patch embedding, "
    caption += f"{float(alike.min()):.2f} to {float(alike.max()):.2f}."
    labels = [_shorten_name(n) for n in names[: len(images)]]
    cells = [[as_shown(image) for image in images], list(alike)]
    return image_grid(cells, rows=["image", "similarity"], columns=labels, bar="cosine", alt=alt, caption=caption)


def _draw_histogram(ax: Axes, norms: list[Tensor], labels: list[str], cutoff: float) -> None:
    known = torch.cat(norms)
    low, high = float(known.min()), float(known.max())
    wide = low > 0 and high / low > 30
    steps = torch.linspace(0, 1, 61, dtype=torch.float64)
    edges = low * (high / low) ** steps if wide else low + (max(high, low + 1e-9) - low) * steps
    for values, label, colour in zip(norms, labels, COLOURS, strict=False):
        counts = torch.bucketize(values.cpu(), edges[1:-1]).bincount(minlength=len(edges) - 1)
        ax.stairs((counts / counts.sum()).tolist(), edges.tolist(), color=colour, linewidth=1.6, label=label)
    if cutoff < high:
        ax.axvline(cutoff, color=ax.xaxis.label.get_color(), linestyle="--", linewidth=1)
    ax.set_xscale("log" if wide else "linear")
    ax.set_yscale("log")
    ax.set_xlabel("norm of a patch")
    ax.set_ylabel("share of patches")
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.legend(frameon=False, labelcolor="linecolor", fontsize=9)


def sparsity_pictures(model: nn.Module) -> list[Picture]:
    """Draw how close the filters of each AFT-conv layer are to one tap per head, by Hoyer's measure.

    Gini and entropy are in the caption.
    """
    model = check_vit(model, "sparsity_pictures")
    found = {
        i: sparsity(filters(b.mixer))
        for i, b in enumerate(model.blocks)
        if has_filters(b.mixer) and b.mixer.kernel_size > 1
    }
    if not found:
        return []
    means = {n: float(torch.cat([getattr(s, n) for s in found.values()]).mean()) for n in ("hoyer", "gini", "entropy")}
    said = f"means over all heads: Hoyer {means['hoyer']:.2f}, Gini {means['gini']:.2f}, entropy {means['entropy']:.2f}"

    def draw(ax: Any) -> None:
        for i, measures in found.items():
            across = (i + torch.linspace(-0.25, 0.25, len(measures.hoyer))).tolist()
            ax.plot(across, measures.hoyer.tolist(), "o", color=COLOURS[0], alpha=0.5, markersize=4, markeredgewidth=0)
            ax.plot([i - 0.25, i + 0.25], [float(measures.hoyer.median())] * 2, color=COLOURS[1], linewidth=2)
        ax.set_ylim(-0.03, 1.03)
        ax.set_xlabel("layer")
        ax.set_ylabel("sparsity of a filter (Hoyer)")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.25, linewidth=0.6)

    alt = f"Dots of the sparsity of each head's filter by layer, with the median of each layer; {said}."
    caption = f"Sparsity of exp(w) - 1, a dot per head, a line at each layer's median: 0 is flat, 1 is one tap; {said}."
    return [Picture(*render_both(draw, (6.4, 3.2)), alt=alt, caption=caption)]


def _number_labels(what: str, numbers: Sequence[int]) -> list[str]:
    return [f"{what} {n}" for n in numbers]


def _numbers(what: str, numbers: Sequence[int]) -> str:
    """Format layers or heads: "layers 0, 2 and 4"."""
    listed = [str(n) for n in numbers]
    if len(listed) > 3 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{what}s {numbers[0]} to {numbers[-1]}"
    return f"{what} {listed[0]}" if len(listed) == 1 else f"{what}s {', '.join(listed[:-1])} and {listed[-1]}"


def _range(values: Iterable[Tensor]) -> str:
    known = torch.cat([v[v.isfinite()].flatten() for v in values])
    if not bool((known != 0).any()):
        return "all exactly 0: nothing has been learned yet"
    return f"from {float(known.min()):.3g} to {float(known.max()):.3g}"


def _shorten_name(name: str) -> str:
    return name if len(name) <= 14 else f"{name[:6]}...{name[-5:]}"


def _nth(j: int) -> str:
    return (
        "most used"
        if j == 0
        else f"{j + 1}{'th' if 10 <= (j + 1) % 100 <= 13 else {1: 'st', 2: 'nd', 3: 'rd'}.get((j + 1) % 10, 'th')}"
    )
