"""Objects found in the features of one layer without labels: LOST (Simeoni et al. 2021, arXiv 2109.14279)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError

MOST = 100
"""Patches of the lowest degree from which a seed is expanded, at most: the paper's k."""
PART = 0.25
"""Of all patches, where that is less; the paper's images have more than 400 patches."""


HALF = 0.5
Box = tuple[int, int, int, int]
"""Top, left, bottom and right, the last two excluded."""


class Found(NamedTuple):
    """An object in one image.

    Attributes:
        seed: (row, column) of the patch that it grew from.
        mask: (H, W) bool, its patches.
        box: (top, left, bottom, right) in patches, the ends excluded.
        degrees: (H, W), how many patches each one resembles, itself included.
    """

    seed: tuple[int, int]
    mask: Tensor
    box: Box
    degrees: Tensor


def discover(features: Tensor, grid: tuple[int, int], *, k: int | None = None, shift: float = 0.0) -> Found:
    """Find the object of one image in features f (N, d) of its N = H W patches.

    With a_pq = f_p . f_q + shift:

    1. degree d_p = the number of q with a_pq >= 0; the seed p* has the lowest, since objects are smaller than what
       surrounds them;
    2. seeds S = those among the k patches of the lowest degrees with a_p*q >= 0, p* included;
    3. the object is the patches q with sum_s a_qs >= 0 over S, as far as they are connected to p* through one of the
       4 neighbours.

    Args:
        k: default: 100 as in the paper, but at most a quarter of the patches.
        shift: a constant added to the products; "Vision Transformers Need Registers" chose one for each model by hand.

    Raises:
        MixerError: features that do not belong to the grid, or k below 1.
    """
    rows, columns = grid
    if features.ndim != 2 or len(features) != rows * columns:
        raise MixerError(f"discover: expects {rows * columns} features (N, d), got {tuple(features.shape)}.")
    k = max(1, min(MOST, round(PART * len(features)))) if k is None else k
    if k < 1:
        raise MixerError(f"discover: k must be at least 1, got {k}.")
    products = features.double() @ features.double().mT + shift
    degrees = (products >= 0).sum(1)
    order = degrees.argsort(stable=True)
    seed = int(order[0])
    lowest = order[:k]
    seeds = lowest[(products[seed, lowest] >= 0) | (lowest == seed)]
    alike = products[:, seeds].sum(1) >= 0
    alike[seed] = True
    mask = connected_part(alike.view(grid), (seed // columns, seed % columns))
    down, across = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
    box = int(down[0]), int(across[0]), int(down[-1]) + 1, int(across[-1]) + 1
    return Found((seed // columns, seed % columns), mask, box, degrees.view(grid))


def overlap(one: Box, other: Box) -> float:
    """Return the area that two boxes share over the area that they cover together."""
    down = min(one[2], other[2]) - max(one[0], other[0])
    across = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0, down) * max(0, across)
    areas = ((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return shared / max(sum(areas) - shared, 1e-30)


def corloc(boxes: Sequence[Box], true: Sequence[Sequence[Box]]) -> float:
    """Compute CorLoc: the share of images whose box overlaps a true one of the same image by more than one half.

    The boxes have one unit, such as pixels; an image may have several true boxes.
    """
    if len(boxes) != len(true) or not boxes:
        raise MixerError(f"corloc: expects true boxes for each of {len(boxes)} images, got {len(true)}.")
    return sum(any(overlap(box, each) > HALF for each in those) for box, those in zip(boxes, true, strict=True)) / len(
        boxes
    )


def connected_part(mask: Tensor, start: tuple[int, int]) -> Tensor:
    """Return the part of a mask (H, W) that is connected to one of its cells through the 4 neighbours."""
    grown = torch.zeros_like(mask)
    grown[start] = mask[start]
    while True:
        wide = grown.clone()
        wide[1:] |= grown[:-1]
        wide[:-1] |= grown[1:]
        wide[:, 1:] |= grown[:, :-1]
        wide[:, :-1] |= grown[:, 1:]
        wide &= mask
        if bool((wide == grown).all()):
            return grown
        grown = wide
