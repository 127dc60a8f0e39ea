"""The gated short convolution of LFM2 as a sum over taps."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_conv(x, weight, z, bias=None, *, positions=None, mask: Tensor | None = None) -> Tensor:
    """Compute y_t = z_t (sum_s w_{s - t} x_s + bias) over the tokens s that the mask allows and a tap falls on."""
    (B, T, _), size = x.shape, weight.shape[1]
    mask = torch.ones(B, T, T, dtype=torch.bool).tril() if mask is None else mask
    at = torch.arange(T).expand(B, T) if positions is None else positions
    tap = at[:, None] - at[:, :, None] + size - 1
    near = mask & (tap >= 0) & (tap < size)
    weights = torch.where(near[..., None], weight.T[tap.clamp(0, size - 1)], 0.0)  # (B, T, S, D)
    y = (weights * x[:, None]).sum(2)
    y = y if bias is None else y + bias
    return torch.where(mask.any(-1)[..., None], z * y, 0.0)
