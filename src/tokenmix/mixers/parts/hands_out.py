"""Modules that return their weights when called without input.

Their owner reads the weights through such a call, so that module hooks, which may fetch weights from elsewhere, see it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class HandsOut(nn.Module):
    """A mix-in: called without input, a module returns ``handed()``; called with input, its usual output."""

    def forward(self, *given: Any) -> Any:
        """Return the weights, or the output of the class that this is mixed into."""
        return super().forward(*given) if given else self.handed()

    def handed(self) -> tuple[Tensor | None, ...]:
        """Return weight and bias."""
        return self.weight, self.bias  # type: ignore[return-value]  # of the class this is mixed into


class ReadLinear(HandsOut, nn.Linear):
    """torch's Linear, with weights that its owner can read."""


class ReadLayerNorm(HandsOut, nn.LayerNorm):
    """torch's LayerNorm, with weights that its owner can read."""


class ReadConv1d(HandsOut, nn.Conv1d):
    """torch's Conv1d, with weights that its owner can read."""


class ReadConv2d(HandsOut, nn.Conv2d):
    """torch's Conv2d, with weights that its owner can read."""


class ReadConv3d(HandsOut, nn.Conv3d):
    """torch's Conv3d, with weights that its owner can read."""


class ReadEmbedding(HandsOut, nn.Embedding):
    """torch's Embedding, with a table that its owner can read."""

    def handed(self) -> tuple[Tensor]:
        """Return the table."""
        return (self.weight,)
