"""Sinusoidal absolute positions: fixed vectors for any position, without parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import MixerError
from .checks import check_exact


class SinusoidalPositions(nn.Module):
    """Fixed sinusoids (Vaswani et al. 2017, Sec. 3.5): p_t holds sin(t w_i) and cos(t w_i), w_i = base^(-2 i / dim).

    The features alternate between sine and cosine. They are computed from the positions, in float64, so there is no
    longest one.

    Args:
        dim: features per position, an even number.
        base: ratio of the longest to the shortest wavelength, about; default 10,000.
        scale: factor on the vectors. They are added to embeddings, which are drawn with a standard deviation of 0.02,
            whereas a sinusoid's is 0.7; the default of 0.02 * sqrt(2) makes the two alike. Vaswani et al. multiply the
            embeddings by sqrt(dim) instead.

    Raises:
        MixerError: if dim is odd.
    """

    max_len: int | None = None

    def __init__(self, dim: int, *, base: float = 10_000.0, scale: float = 0.02 * 2**0.5):
        super().__init__()
        if dim < 2 or dim % 2:
            raise MixerError(f"SinusoidalPositions: dim must be an even number, got {dim}.")
        self.dim, self.base, self.scale = dim, base, scale

    def forward(self, positions: Tensor) -> Tensor:
        """Compute the vectors of integer positions (B, T) -> (B, T, dim), in float64."""
        check_exact("SinusoidalPositions", positions)
        rates = self.base ** (torch.arange(0, self.dim, 2, device=positions.device, dtype=torch.float64) / -self.dim)
        angles = positions.double()[..., None] * rates
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2) * self.scale
