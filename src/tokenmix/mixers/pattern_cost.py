"""Counting the pairs that blocks compute, and the bytes they keep: the cost formulas of the pattern mixers."""

from __future__ import annotations

from typing import NamedTuple

from ..functional._blocks import LEAST


class Pairs(NamedTuple):
    """Pairs of query and key that a part computes, masked ones and padding included, and how often each key is copied to do so."""

    pairs: int
    copies: float


class BlockCost:
    """Pairs over T tokens, in the blocks of ``functional._blocks``."""

    def __init__(self, T: int):
        self.T = T

    def blocks(self, size: int, side: int) -> Pairs:
        """Blocks of ``size`` over themselves and ``side`` blocks on each side."""
        n = -(-self.T // size)
        m = 1 + 2 * min(side, n - 1)
        return Pairs(n * size * m * size, m if m > 1 else 0)

    def band(self, back: int, ahead: int) -> Pairs:
        """A window, as ``_blocks.band`` cuts it."""
        size = min(max(back, ahead, LEAST), self.T)
        return self.blocks(size, -(-max(back, ahead) // size))

    def dilated(self, reach: int, d: int) -> Pairs:
        """A window in each of d residue classes."""
        one = BlockCost(-(-self.T // d)).band(reach, reach)
        return Pairs(d * one.pairs, one.copies)

    def columns(self, step: int) -> Pairs:
        """Everything within each residue class."""
        n = -(-self.T // step)
        return BlockCost(n).band(n - 1, n - 1)._replace(copies=1) if step == 1 else Pairs(step * BlockCost(n).band(n - 1, n - 1).pairs, 1)

    def own_block(self, size: int) -> Pairs:
        """Everything within each block."""
        return self.blocks(size, 0)

    def shared(self, keys: int) -> Pairs:
        """All queries over the same keys."""
        return Pairs(self.T * keys, 0)

    def chosen(self, size: int, count: int) -> Pairs:
        """Blocks of queries over ``count`` chosen blocks each."""
        n = -(-self.T // size)
        return Pairs(n * size * count * size, count)

    def mean(self, parts: list[Pairs]) -> Pairs:
        """What one head takes on average."""
        return Pairs(sum(p.pairs for p in parts) // len(parts), sum(p.copies for p in parts) / len(parts))


def kept_bytes(D: int, heads: int, T: int, parts: list[Pairs], *, share: int = 1, rows: int = 0, pools: int = 0) -> int:
    """Bytes kept for backward: weights (float) and copied keys and values of each part, num and den, and the projected rows.

    share: parts of the heads that each part of the pattern has; rows: queries that attend everything.
    """
    weights = sum(4 * heads * p.pairs for p in parts) // share + 4 * heads * rows * T
    copies = int(sum(8 * D * T * p.copies for p in parts)) // share
    return weights + copies + 4 * D * T * (4 + len(parts) // share + pools)
