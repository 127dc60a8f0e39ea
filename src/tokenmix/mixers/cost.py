"""What a mixer costs, as numbers: the formulas are each mixer's own ``mixing_cost``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class MixingCost(NamedTuple):
    """What joining T tokens of one row takes, beside the projections.

    flops: two for each multiply-accumulate, those of element-wise sums included; a causal form is counted like the full one, as papers do.
    counted: the part of ``flops`` that is matrix products and convolutions in the eager bidirectional form, exactly as torch's FlopCounterMode
        counts them; None where the eager form works in blocks or element by element, so that the counter sees something else.
    activations: bytes that autograd keeps for backward over the whole layer in float32, leading terms (within a factor of 2).
    state: bytes of the streaming state in float32 after T tokens, exact.
    """

    flops: int
    counted: int | None
    activations: int
    state: int = 0


@dataclass(frozen=True)
class Cost:
    """What one forward pass takes; FLOPs count a multiply and an add as two, bytes are those of float32."""

    projections: int
    mixing: int
    parameters: int
    activations: int
    state: int

    @property
    def flops(self) -> int:
        """All FLOPs: of the maps of each token and of what joins tokens."""
        return self.projections + self.mixing

    @property
    def mixing_share(self) -> float:
        """The part of the FLOPs that goes into joining tokens."""
        return self.mixing / self.flops
