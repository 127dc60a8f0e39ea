"""Stand-in for ``out_proj`` in mixers whose paper has no projections."""

import torch
from torch import nn


class Unprojected(nn.Identity):
    """The identity, with nothing to initialise. Its empty buffer says on which device and in which dtype a mixer without parameters works."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("like", torch.empty(0), persistent=False)

    def reset_parameters(self) -> None:
        """There is nothing to draw."""
