"""Stand-in for ``out_proj`` in mixers whose paper has no projections."""

from __future__ import annotations

import torch
from torch import nn


class Unprojected(nn.Identity):
    """The identity, without parameters.

    Its empty buffer records the device and dtype of a mixer that has no parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("like", torch.empty(0), persistent=False)

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""
