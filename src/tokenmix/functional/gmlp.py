"""The spatial gating unit of gMLP (Liu et al. 2021): half the channels, mixed across tokens, gate the other half."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.backend import Backend, choose
from ..kernels.precision import at_least_float32, exact
from .sums.nonfinite import hides
from .sums.taps import silenced

EPS = 1e-5


@exact
@hides("z")
def gmlp(
    z: Tensor,
    spatial: Tensor,
    bias: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute s(Z) = Z1 * (W norm(Z2) + b) with [Z1, Z2] = gelu(z) (Liu et al. 2021, Eq. 1 to 4).

    The norm is over channels.

    Args:
        z: (B, T, 2 f), the projected input before its gelu.
        spatial: W (T, T) or (B, T, T); w_ts weighs token s for token t. causal: only s <= t counts.
        bias: b (T,) or (B, T).
        scale, shift: (f,), of the norm.

    Returns:
        (B, T, f) in z's dtype; exactly 0 where a token has nothing to attend. Time O(T^2 f).
    """
    choose("gmlp", backend, z)
    gate, value = unit_inputs(z, scale, shift)
    value = silenced(value, key_mask)
    T = z.shape[1]
    spatial, bias = (a.to(value.dtype) for a in (spatial, bias))
    if causal:
        spatial = spatial.tril()
    y = gate * (spatial @ value + bias[..., None])
    if key_mask is not None:
        some = key_mask.cumsum(1) > 0 if causal else key_mask.any(1, keepdim=True).expand(-1, T)
        y = torch.where(some[..., None], y, 0.0)
    return y.to(z.dtype)


def unit_inputs(z: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Z1 and norm(Z2), each (B, T, f), in float32 or better.

    The norm runs in float64, because it magnifies the rounding of nearly equal channels 300 times.
    """
    gate, value = F.gelu(at_least_float32(z)).chunk(2, -1)
    wide = value.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return gate, (normed * scale.double() + shift.double()).to(value.dtype)
