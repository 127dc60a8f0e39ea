"""Parts of linear attention, Performer and RFA: their streaming sums, how they are read, and their cost."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...functional.sums import features as sums
from ..base import register_state
from ..cost import MixingCost


@register_state
class KernelState(NamedTuple):
    """Sums over all keys so far, in float64. The size is constant.

    m (B, H, M): the scale of each of the M features. acc (B, H, e + 1, M): the sums; the last row is the denominator.
    """

    m: Tensor
    acc: Tensor

    def merge_with(self, later: KernelState) -> KernelState:
        """Return the sums over two adjacent stretches of tokens."""
        return KernelState(*sums.merge_past(self, later))


def over_context(q: Tensor, a: Tensor, state: KernelState) -> Tensor:
    """Return the output of queries over completed sums."""
    return sums.joined_heads(sums.read(a, sums.as_total(state)), q)


def kernel_cost(T: int, dim: int, heads: int, features: int, *, drawn: bool) -> MixingCost:
    """Compute the cost of summing and reading ``features`` features per head.

    Args:
        drawn: whether the features are random projections of q and k.
    """
    e = dim // heads
    flops = 4 * T * heads * features * (e + 1) + (4 * T * dim * features if drawn else 0)
    kept = 4 * T * (2 * dim) + 8 * T * (5 * heads * features + 2 * dim)
    return MixingCost(flops=flops, counted=flops, activations=kept, state=8 * heads * features * (e + 2))
