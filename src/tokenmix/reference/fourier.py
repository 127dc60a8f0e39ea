"""Fourier mixing (Lee-Thorp et al. 2021, Eq. 1 and 3) as written, with complex matrices."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor


def fourier(x: Tensor, *, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Compute Re(F_tokens X F_features), with F_tokens of each row's own length, up to its last valid token."""
    (B, T, D), rows = x.shape, []
    over_features = torch.exp(-2j * pi * torch.outer(torch.arange(D), torch.arange(D)).double() / D)
    for b in range(B):
        valid = torch.ones(T, dtype=torch.bool) if mask is None else mask[b].any(0)
        if not valid.any():
            rows.append(torch.zeros_like(x[b]))
            continue
        start = int(valid.nonzero()[0])
        position = (torch.arange(T) - start).clamp_min(0) if positions is None else positions[b]
        L = int(position[valid].max()) + 1
        over_tokens = torch.exp(-2j * pi * (torch.outer(position, position) % L).double() / L)
        rows.append((over_tokens @ torch.where(valid[:, None], x[b], 0.0).to(torch.complex128) @ over_features).real)
    return torch.stack(rows)
