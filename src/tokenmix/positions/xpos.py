"""xPOS: rotary positions whose products fade with the distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import MixerError
from ..types import Options
from .checks import number
from .rotary import RotaryPositions


class XPositions(RotaryPositions):
    """Rotary positions with a decay: (R_t q) . (R_s k) with pair m weighted by zeta_m^((t - s) / scale_base).

    zeta_m = (2 m / d + gamma) / (1 + gamma), m = 0 .. d / 2 - 1. Sun et al. 2022, arXiv 2212.10554. The paper
    multiplies queries by zeta^(t / scale_base) and keys by zeta^(-s / scale_base); only their product matters, so both
    are taken from a position between the two, and tokens that reach further than float32 allows are refused. For causal
    mixers: towards the future the products would grow.

    Args:
        head_dim, base, rotary_dim, layout, scaling: as in ``RotaryPositions``.
        gamma: 0.4 by default; the smaller, the faster the fastest pairs fade.
        scale_base: positions over which pair m fades by zeta_m, 512 by default.

    Raises:
        MixerError: for invalid options.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        gamma: float = 0.4,
        scale_base: float = 512.0,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        layout: str = "half",
        scaling: Options | None = None,
    ):
        super().__init__(head_dim, base=base, rotary_dim=rotary_dim, layout=layout, scaling=scaling)
        for name, value in (("gamma", gamma), ("scale_base", scale_base)):
            if not number(value) or value <= 0:
                raise MixerError(f"XPositions: {name} must be a positive number, got {value!r}.")
        self.gamma, self.scale_base = gamma, scale_base
        pairs = self.rotary_dim // 2
        self.fades = tuple(math.log((m / pairs + gamma) / (1 + gamma)) / scale_base for m in range(pairs))

    def decay_features(self, x: Tensor, positions: Tensor, start: Tensor, *, key: bool) -> Tensor:
        """Multiply pair m of queries by zeta_m^((t - start) / scale_base), or of keys by the inverse.

        Args:
            x: (B, heads, T, head_dim).
            positions: (B, T); start: (B,), the position from which both count.
        """
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        far = (positions - start[:, None])[:, None, :, None].to(exact)
        power = far * torch.tensor(self.fades, dtype=exact, device=x.device) * (-1 if key else 1)
        factors = power.exp().to(torch.promote_types(x.dtype, torch.float32))
        both = torch.cat([factors, factors], -1) if self.layout == "half" else factors.repeat_interleave(2, -1)
        turned, rest = x.split([self.rotary_dim, self.head_dim - self.rotary_dim], -1)
        return torch.cat([(turned * both).to(x.dtype), rest], -1)

    def longest(self, dtype: torch.dtype) -> int:
        """Return how many positions one call may span, so that even the product of a query and a key that come in the
        wrong order, which masks hide, stays within the range of ``dtype``."""
        return int(_room(dtype) / -min(self.fades))

    def extra_repr(self) -> str:
        """Return the options, for print."""
        return f"{super().extra_repr()}, gamma={self.gamma:g}, scale_base={self.scale_base:g}"


def _room(dtype: torch.dtype) -> float:
    """Return the logarithm of the largest factor: e^4 below the largest number."""
    return math.log(torch.finfo(dtype).max) - 4
