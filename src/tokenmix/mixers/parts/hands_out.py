"""Modules whose weights their owner reads: called without input they hand them out, so that hooks, which may fetch weights from elsewhere, see it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class HandsOut(nn.Module):
    """Called without input, a module gives ``handed()``; with input, what it gives anyway."""

    def forward(self, *given: Any) -> Any:
        """The weights, or what the class beside this one makes of its input."""
        return super().forward(*given) if given else self.handed()

    def handed(self) -> tuple[Tensor | None, ...]:
        """Weight and bias."""
        return self.weight, self.bias  # type: ignore[return-value]  # of the class beside this one


class ReadLinear(HandsOut, nn.Linear):
    """torch's Linear, whose owner also reads its weights."""


class ReadLayerNorm(HandsOut, nn.LayerNorm):
    """torch's LayerNorm, whose owner also reads its weights."""


class ReadConv1d(HandsOut, nn.Conv1d):
    """torch's Conv1d, whose owner also reads its weights."""


class ReadConv2d(HandsOut, nn.Conv2d):
    """torch's Conv2d, whose owner also reads its weights."""


class ReadConv3d(HandsOut, nn.Conv3d):
    """torch's Conv3d, whose owner also reads its weights."""


class ReadEmbedding(HandsOut, nn.Embedding):
    """torch's Embedding, whose owner also reads its table."""

    def handed(self) -> tuple[Tensor]:
        """The table."""
        return (self.weight,)
