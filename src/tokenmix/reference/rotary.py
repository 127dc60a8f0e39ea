"""Rotary positions (Su et al. 2021, arXiv 2104.09864, Eq. 13 to 16) as written.

Pairs of features are complex numbers, rotated by a phase.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(
    x: Tensor, positions: Tensor, *, heads: int, thetas: list[float], layout: str = "half", gain: float = 1.0
) -> Tensor:
    """Compute (x_a + i x_b) e^(i t theta_m) for pair m of each head's first 2 len(thetas) features, at position t.

    The other features stay. x (B, T, heads e).
    """
    out, width, pairs = x.clone(), x.shape[-1] // heads, len(thetas)
    for h in range(heads):
        for m, theta in enumerate(thetas):
            a, b = (m, m + pairs) if layout == "half" else (2 * m, 2 * m + 1)
            a, b = h * width + a, h * width + b
            turned = torch.complex(x[..., a], x[..., b]) * torch.polar(
                torch.full_like(x[..., a], gain), positions.to(x.dtype) * theta
            )
            out[..., a], out[..., b] = turned.real, turned.imag
    return out
