"""The cost of a mixer as numbers; each mixer's ``mixing_cost`` holds the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn


class MixingCost(NamedTuple):
    """The cost of mixing the T tokens of one row, without the projections.

    Attributes:
        flops: two per multiply-accumulate, element-wise sums included. A causal form counts as much as the full one, as
            in papers.
        counted: the part of ``flops`` in matrix products and convolutions of the eager bidirectional form, exactly as
            torch's FlopCounterMode counts it. None where the eager form works in blocks or element by element, so that
            the counter sees something else.
        activations: bytes that autograd keeps for the backward pass of the whole layer in float32; leading terms only,
            accurate within a factor of 2.
        state: exact bytes of the streaming state in float32 after T tokens.
        projections: FLOPs of the maps that act on each token alone; None: each Linear once per token.
    """

    flops: int
    counted: int | None
    activations: int
    state: int = 0
    projections: int | None = None


@dataclass(frozen=True)
class Cost:
    """The cost of one forward pass. A multiply and an add are two FLOPs; bytes are those of float32."""

    projections: int
    mixing: int
    parameters: int
    activations: int
    state: int

    @property
    def flops(self) -> int:
        """Return all FLOPs: those of the projections and those of mixing."""
        return self.projections + self.mixing

    @property
    def mixing_share(self) -> float:
        """Return the share of the FLOPs that mixing takes, from 0 to 1."""
        return self.mixing / self.flops


def projection_flops(layer: nn.Module, T: int) -> int:
    """Count the FLOPs of a row of T tokens in the Linear layers, each once per token."""
    return sum(2 * T * m.in_features * m.out_features for m in layer.modules() if isinstance(m, nn.Linear))
