"""Parts of the pattern mixers: positions for the dense form, streaming over a history, and the cost of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ...functional.layout.blocks import LEAST
from ...positions import PairPositions, build_pair_positions
from ..base import chunk_positions, token_positions
from .history import HistoryState, append_tokens
from .shared import valid_mask


def explicit(x: Tensor, positions: Tensor | None, key_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """Return explicit positions where an attn_mask requires the dense form."""
    return token_positions(x, key_mask) if positions is None and attn_mask is not None else positions


def build_distance_bias(mixer: Any, spec: dict[str, Any] | None, heads: int) -> PairPositions | None:
    """Build the bias that ``bias`` names; refuse one that is not a function of the distance."""
    bias = None if spec is None else build_pair_positions(spec, heads, owner=type(mixer).__name__)
    if bias is not None and not bias.by_distance:
        mixer.refuse(f"bias={spec!r}: its pattern takes biases by distance; attention takes any")
    return bias


def bias_options(bias: PairPositions | None, x: Tensor) -> dict[str, Any]:
    """Return the bias of the logits of x as arguments of a functional form, empty without a bias."""
    return {} if bias is None else {"added": lambda far: bias(far, None, x.dtype)}


def history_step(
    mixer: Any,
    form: Callable[..., Tensor],
    x: Tensor,
    state: HistoryState,
    options: dict[str, Any],
    *,
    positions: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, HistoryState]:
    """Mix a chunk of a causal mixer that has q, k and v projections with its history.

    The first chunk at default positions is computed in blocks.
    """
    query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
    q, k, v = mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)
    options = {**options, **bias_options(mixer.bias, x)}
    first = state.keys.shape[1] == 0 and positions is None
    state = append_tokens(state, valid_mask(x, key_mask), query_positions, keys=k, values=v)._replace(
        position=next_position
    )
    if first:
        y = form(q, k, v, causal=True, key_mask=key_mask, **options)
    else:
        keys, values = state.keys.to(q.dtype), state.values.to(q.dtype)
        y = form(
            q, keys, values, causal=True, key_mask=state.valid, positions=(query_positions, state.positions), **options
        )
    return mixer.out_proj(y), state


class Pairs(NamedTuple):
    """The cost of one part of a pattern.

    Attributes:
        pairs: pairs of query and key that are computed, masked ones and padding included.
        copies: how often each key is copied for that.
    """

    pairs: int
    copies: float


class BlockCost:
    """Count pairs over T tokens in the blocks of ``functional.layout.blocks``."""

    def __init__(self, T: int):
        self.T = T

    def blocks(self, size: int, side: int) -> Pairs:
        """Count blocks of ``size`` tokens over themselves and ``side`` blocks on each side."""
        n = -(-self.T // size)
        m = 1 + 2 * min(side, n - 1)
        return Pairs(n * size * m * size, m if m > 1 else 0)

    def band(self, back: int, ahead: int) -> Pairs:
        """Count a window, as ``functional.layout.blocks`` cuts it."""
        size = min(max(back, ahead, LEAST), self.T)
        return self.blocks(size, -(-max(back, ahead) // size))

    def count_dilated(self, reach: int, d: int) -> Pairs:
        """Count a window in each of d residue classes."""
        one = BlockCost(-(-self.T // d)).band(reach, reach)
        return Pairs(d * one.pairs, one.copies)

    def columns(self, step: int) -> Pairs:
        """Count all pairs within each residue class."""
        n = -(-self.T // step)
        return (
            BlockCost(n).band(n - 1, n - 1)._replace(copies=1)
            if step == 1
            else Pairs(step * BlockCost(n).band(n - 1, n - 1).pairs, 1)
        )

    def own_block(self, size: int) -> Pairs:
        """Count all pairs within each block."""
        return self.blocks(size, 0)

    def count_shared(self, keys: int) -> Pairs:
        """Count all queries over the same keys."""
        return Pairs(self.T * keys, 0)

    def count_chosen(self, size: int, count: int) -> Pairs:
        """Count blocks of queries over ``count`` chosen blocks each."""
        n = -(-self.T // size)
        return Pairs(n * size * count * size, count)

    def mean(self, parts: list[Pairs]) -> Pairs:
        """Return the mean cost per head."""
        return Pairs(sum(p.pairs for p in parts) // len(parts), sum(p.copies for p in parts) / len(parts))


def kept_bytes(D: int, heads: int, T: int, parts: list[Pairs], *, share: int = 1, rows: int = 0, pools: int = 0) -> int:
    """Compute the bytes kept for the backward pass.

    They hold weights in float32, copied keys and values of each part, numerators and denominators, and projected rows.

    Args:
        share: each part of the pattern belongs to 1 / share of the heads.
        rows: number of queries that attend everything.
        pools: number of pooled values per token.
    """
    weights = sum(4 * heads * p.pairs for p in parts) // share + 4 * heads * rows * T
    copies = int(sum(8 * D * T * p.copies for p in parts)) // share
    return weights + copies + 4 * D * T * (4 + len(parts) // share + pools)
