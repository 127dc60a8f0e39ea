"""Modules that return their weights when called without input.

Their owner reads the weights through such a call, so that module hooks, which may fetch weights from elsewhere, see it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class WeightsOnCall(nn.Module):
    """A mix-in: called without input, a module returns ``weights_on_call()``; called with input, its usual output."""

    def forward(self, *given: Any) -> Any:
        """Return the weights, or the output of the class that this is mixed into."""
        return super().forward(*given) if given else self.weights_on_call()

    def weights_on_call(self) -> tuple[Tensor | None, ...]:
        """Return weight and bias."""
        return self.weight, self.bias  # type: ignore[return-value]  # of the class this is mixed into


class ReadLinear(WeightsOnCall, nn.Linear):
    """torch's Linear, with weights that its owner can read."""


class ReadLayerNorm(WeightsOnCall, nn.LayerNorm):
    """torch's LayerNorm, with weights that its owner can read."""


class ReadConv1d(WeightsOnCall, nn.Conv1d):
    """torch's Conv1d, with weights that its owner can read."""


class ReadConv2d(WeightsOnCall, nn.Conv2d):
    """torch's Conv2d, with weights that its owner can read."""


class ReadConv3d(WeightsOnCall, nn.Conv3d):
    """torch's Conv3d, with weights that its owner can read."""


class ReadEmbedding(WeightsOnCall, nn.Embedding):
    """torch's Embedding, with a table that its owner can read."""

    def weights_on_call(self) -> tuple[Tensor]:
        """Return the table."""
        return (self.weight,)
