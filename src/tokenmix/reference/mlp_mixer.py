"""Token mixing of the MLP-Mixer (Tolstikhin et al. 2021, Eq. 1) as written, channel by channel."""

from __future__ import annotations

import torch
from torch import Tensor


def mlp_mixer(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Compute W2 sigma(W1 X_{*,i} + b1) + b2 for each channel i, sigma the Gaussian error linear unit.

    A row without tokens gives 0.
    """
    valid = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.any(1)
    rows = []
    for b in range(x.shape[0]):
        first, second, last = (a[b] if a.ndim == n else a for a, n in ((w1, 3), (w2, 3), (b2, 2)))
        channels = []
        for i in range(x.shape[-1]):
            h = first @ torch.where(valid[b], x[b, :, i], 0.0) + b1
            h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
            channels.append(second @ h + last)
        rows.append(torch.stack(channels, -1) * bool(valid[b].any()))
    return torch.stack(rows)
