"""Where single tokens look: maps over the patches, how smooth they are, and how much of them outliers take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def smoothness(maps: Tensor) -> Tensor:
    """Compute Moran's I of maps (..., H, W) over pairs of 4-neighbours, in float64.

    I = (N / W) sum_(i, j neighbours) d_i d_j / sum_i d_i^2, d = value less the map's mean, N cells and W ordered pairs
    (Moran 1950). 1 is smooth, about 0 is noise, -1 is a chessboard; a constant map gives NaN.
    """
    d = maps.double() - maps.double().mean((-2, -1), keepdim=True)
    down, across = (d[..., 1:, :] * d[..., :-1, :]).sum((-2, -1)), (d[..., 1:] * d[..., :-1]).sum((-2, -1))
    rows, columns = maps.shape[-2:]
    pairs = (rows - 1) * columns + rows * (columns - 1)
    squares = d.square().sum((-2, -1))
    tiny = 1e-24 * maps.double().square().sum((-2, -1))  # what rounding leaves of a constant map
    return torch.where(squares > tiny, rows * columns * (down + across) / (pairs * squares), torch.nan)


class Look(NamedTuple):
    """Where a token looks.

    Attributes:
        name: of the token, such as "[CLS]".
        maps: (B, H, W), its weights of the patches, which sum to 1.
        smooth: mean of Moran's I over the images, or None.
        on_outliers: mean share of the weights that outliers get, or None without outliers.
    """

    name: str
    maps: Tensor
    smooth: float | None
    on_outliers: float | None


def token_looks(weights: Tensor, names: list[str], grid: tuple[int, int], mask: Tensor, norms: Tensor) -> list[Look]:
    """Return where the tokens before the patches look, where the patch of the largest norm does, and all patches' mean.

    Args:
        weights: (B, T, T), how much each token reads of each.
        names: of the tokens before the patches.
        mask: (B, H, W), the outliers.
        norms: (B, H, W), of the patches after the last layer.
    """
    n = len(names)
    to_patches = weights[:, :, n:].double()
    to_patches = to_patches / to_patches.sum(-1, keepdim=True).clamp_min(1e-300)
    rows = {name: to_patches[:, i] for i, name in enumerate(names)}
    largest = norms.flatten(1).argmax(1)
    rows["patch of the largest norm"] = to_patches[torch.arange(len(weights)), n + largest]
    rows["mean of all patches"] = to_patches[:, n:].mean(1)
    return [measure_maps(name, row.unflatten(1, grid), mask) for name, row in rows.items()]


def measure_maps(name: str, maps: Tensor, mask: Tensor) -> Look:
    """Measure one token's maps (B, H, W), of which ``mask`` marks the outliers."""
    found = smoothness(maps)
    known = found[found.isfinite()]
    having = mask.flatten(1).any(1)
    shares = (maps * mask).flatten(1).sum(1)[having]
    return Look(
        name,
        maps,
        float(known.mean()) if known.numel() else None,
        float(shares.mean()) if bool(having.any()) else None,
    )
