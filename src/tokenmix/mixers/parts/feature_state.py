"""What linear attention, Performer and RFA share: projections, the sums they stream, and how those are read and extended."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...functional.sums import features as sums
from ..base import register_state
from ..cost import MixingCost


@register_state
class KernelState(NamedTuple):
    """Sums over all keys so far, in float64: the scale m (B, H, M) of each of M features, and acc (B, H, e + 1, M), whose last row is the denominator."""

    m: Tensor
    acc: Tensor

    def merge_with(self, later: KernelState) -> KernelState:
        """The sums over two adjacent stretches of tokens."""
        return KernelState(*sums.merge_past(self, later))


def over_context(q: Tensor, a: Tensor, state: KernelState) -> Tensor:
    """Queries over finished sums."""
    return sums.joined_heads(sums.read(a, sums.whole(state)), q)


def kernel_cost(T: int, dim: int, heads: int, features: int, *, drawn: bool) -> MixingCost:
    """Sums of ``features`` features per head and their reading; ``drawn`` ones are random projections of q and k."""
    e = dim // heads
    flops = 4 * T * heads * features * (e + 1) + (4 * T * dim * features if drawn else 0)
    kept = 4 * T * (2 * dim) + 8 * T * (5 * heads * features + 2 * dim)
    return MixingCost(flops=flops, counted=flops, activations=kept, state=8 * heads * features * (e + 2))
