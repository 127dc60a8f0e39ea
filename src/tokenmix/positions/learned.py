"""Learned absolute positions: one vector per position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from .checks import check_init_std, check_integers, extremes, may_read
from .grid import replacing_parameter


class LearnedPositions(nn.Module):
    """A learned table (max_len, dim) with p_t as row t, initialised N(0, init_std)."""

    def __init__(self, dim: int, *, max_len: int, init_std: float = 0.02):
        super().__init__()
        check_init_std("LearnedPositions", init_std)
        self.max_len, self.init_std = max_len, init_std
        self.weight = nn.Parameter(torch.empty(max_len, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table again."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, positions: Tensor) -> Tensor:
        """Look up integer positions (B, T) -> (B, T, dim).

        Raises:
            MixerError: if they are no integers or, on the CPU, not all in 0 .. max_len - 1.
        """
        check_integers("LearnedPositions", positions)
        if may_read(positions):
            low, high = extremes(positions)
            if low < 0 or high >= self.max_len:
                raise MixerError(
                    f"LearnedPositions: has a table for positions 0..{self.max_len - 1}, got positions {low}..{high}."
                )
        return F.embedding(positions.long(), self.weight)

    def resize(self, max_len: int) -> None:
        """Change the number of positions by linear interpolation, so that position i moves to i * new / old."""
        if max_len < 1:
            raise MixerError(f"LearnedPositions: max_len must be positive, got {max_len}.")
        self.weight = replacing_parameter(
            self.weight,
            F.interpolate(self.weight.detach().T[None], size=max_len, mode="linear", align_corners=False)[0].T,
        )
        self.max_len = max_len
