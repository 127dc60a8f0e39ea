"""The spatial gating unit of gMLP (Liu et al. 2021, Eq. 1 to 4) as written."""

from __future__ import annotations

import torch
from torch import Tensor


def gmlp(
    z: Tensor, spatial: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Compute Z1 * (W norm(Z2) + b), Z = gelu(X U).

    Token t weighs only the tokens its mask allows, and is 0 without any.
    """
    z = z * 0.5 * (1 + torch.erf(z / 2**0.5))
    f = z.shape[-1] // 2
    z1, z2 = z[..., :f], z[..., f:]
    centred = z2 - z2.mean(-1, keepdim=True)
    z2 = centred / ((centred**2).mean(-1, keepdim=True) + 1e-5).sqrt() * scale + shift
    if mask is None:
        return z1 * (spatial @ z2 + bias[..., None])
    z2 = torch.where(mask.any(1)[..., None], z2, 0.0)
    mixed = torch.where(mask, spatial, 0.0) @ z2 + bias[..., None]
    return torch.where(mask.any(2)[..., None], z1 * mixed, 0.0)
