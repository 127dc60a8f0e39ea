"""Learned absolute positions that vary smoothly: weighted sums of slow waves."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..errors import MixerError
from .checks import check_exact, check_init_std, is_whole, number


class SmoothPositions(nn.Module):
    """p_t = sum_m a_m cos(2 pi t / l_m) + b_m sin(2 pi t / l_m), with learned a_m and b_m in R^dim.

    The M wavelengths l_m rise by a constant factor from ``shortest`` to ``longest``. So the vector changes from a
    position to the next by at most 2 pi sum_m (|a_m| + |b_m|) / l_m, it is defined at every position, and the number of
    parameters, 2 M dim, does not depend on the length. That learned vectors should vary smoothly with the position is
    the aim of FLOATER (Liu et al. 2020, arXiv 2003.09229), which solves a differential equation for them; the form here
    is ours.

    Args:
        dim: features per position.
        waves: the number M of wavelengths, at least 1.
        shortest, longest: the least and the greatest wavelength in positions, 2 <= shortest <= longest.
        init_std: standard deviation of the features of p_t before training.

    Raises:
        MixerError: for options that are none of these.
    """

    max_len: int | None = None

    def __init__(
        self,
        dim: int,
        *,
        waves: int = 16,
        shortest: float = 8.0,
        longest: float = 4096.0,
        init_std: float = 0.02,
    ):
        super().__init__()
        check_init_std("SmoothPositions", init_std)
        if not is_whole(waves, 1):
            raise MixerError(f"SmoothPositions: waves must be an integer of at least 1, got {waves!r}.")
        if not number(shortest) or not number(longest) or not 2 <= shortest <= longest:
            raise MixerError(
                "SmoothPositions: wavelengths are numbers with 2 <= shortest <= longest, got "
                + f"shortest={shortest!r}, longest={longest!r}."
            )
        self.waves, self.shortest, self.longest, self.init_std = waves, shortest, longest, init_std
        self.weight = nn.Parameter(torch.empty(2 * waves, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights again, from N(0, init_std^2 / waves)."""
        nn.init.normal_(self.weight, std=self.init_std / self.waves**0.5)

    def forward(self, positions: Tensor) -> Tensor:
        """Compute the vectors of integer positions (B, T) -> (B, T, dim), in float64."""
        check_exact("SmoothPositions", positions)
        steps = torch.arange(self.waves, device=positions.device, dtype=torch.float64) / max(self.waves - 1, 1)
        rates = 2 * math.pi / self.shortest * (self.shortest / self.longest) ** steps
        angles = positions.double()[..., None] * rates
        return torch.cat([angles.cos(), angles.sin()], -1) @ self.weight.double()
