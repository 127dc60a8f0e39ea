"""Sample representative points of a cloud and find their neighbours, by torch's distances and without gradients."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def farthest_points(points: Tensor, n: int) -> Tensor:
    """Choose n points of each cloud by farthest-point sampling (Eldar et al. 1997); returns indices (B, n).

    The first is the one farthest from the mean of the cloud, and each further one the farthest from those chosen. So
    the choice does not depend on the order of the points, except where two are equally far.

    Args:
        points: (B, N, 3), n at most N.
    """
    distance = (points - points.mean(1, keepdim=True)).square().sum(-1)
    nearest = torch.full_like(distance, float("inf"))
    chosen = []
    for _ in range(n):
        last = distance.argmax(1, keepdim=True)  # (B, 1)
        chosen.append(last)
        nearest = torch.minimum(nearest, (points - gather_points(points, last)).square().sum(-1))
        distance = nearest
    return torch.cat(chosen, 1) if chosen else points.new_empty(len(points), 0, dtype=torch.long)


@torch.no_grad()
def nearest_points(queries: Tensor, points: Tensor, k: int) -> Tensor:
    """Return the indices (B, M, k) of the k points (B, N, 3) nearest to each query (B, M, 3), the nearest first."""
    exact = torch.cdist(queries, points, compute_mode="donot_use_mm_for_euclid_dist")
    return exact.topk(k, largest=False).indices


def gather_points(x: Tensor, indices: Tensor) -> Tensor:
    """Pick tokens: x (B, N, C) and indices (B, ...) -> (B, ..., C)."""
    flat = indices.flatten(1)
    return x.gather(1, flat[..., None].expand(-1, -1, x.shape[-1])).unflatten(1, indices.shape[1:])
