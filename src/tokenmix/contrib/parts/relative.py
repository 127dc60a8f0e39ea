"""Transformer-XL's relative positions (Dai et al. 2019, arXiv 1901.02860): sinusoids of distances, and their logits."""

from __future__ import annotations

import torch
from torch import Tensor


def sinusoid(distances: Tensor, width: int) -> Tensor:
    """Compute R_d (..., width): sines, then cosines, of d / 10000^(i/n), n = width / 2.

    float64, so that far distances keep their phase.
    """
    n = width // 2
    rate = 10000.0 ** (-torch.arange(n, dtype=torch.float64, device=distances.device) / n)
    angle = distances[..., None] * rate
    return torch.cat([angle.sin(), angle.cos()], -1)


def by_position(located: Tensor, rows: Tensor, cols: Tensor, relative: Tensor) -> Tensor:
    """Compute the products of queries with the W_r R_{t-s} of their distances, for arbitrary positions.

    sin and cos of t - s are products of those of t and of s, so one matrix product gives all pairs.
    """
    width = relative.shape[1]
    z_sin, z_cos = (located @ relative.unflatten(0, (-1, located.shape[-1]))).chunk(2, -1)  # (B, H, T, n) each
    sin, cos = (a[:, None].to(located.dtype) for a in sinusoid(rows, width).chunk(2, -1))
    left = torch.cat([z_sin * sin + z_cos * cos, z_cos * sin - z_sin * cos], -1)
    sin, cos = (a[:, None].to(located.dtype) for a in sinusoid(cols, width).chunk(2, -1))
    return left @ torch.cat([cos, sin], -1).transpose(-1, -2)


def largest_relative(q: Tensor, k: Tensor, relative: Tensor, content: Tensor, place: Tensor, heads: int) -> float:
    """Return a bound on the largest logit with Transformer-XL's relative positions."""
    q, k, u, b = (a.detach().unflatten(-1, (heads, -1)).transpose(-2, -3) for a in (q, k, content[None], place[None]))
    located = (q + b) @ relative.detach().unflatten(0, (heads, -1))
    far = located.norm(dim=-1).max() * (relative.shape[1] / 2) ** 0.5  # the norm of every R_d
    return float((((q + u) @ k.transpose(-1, -2)).abs().max() + far) * q.shape[-1] ** -0.5)
