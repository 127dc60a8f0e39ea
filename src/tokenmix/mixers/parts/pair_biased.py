"""What AFT-full and AFT-local have in common: a bias w_ts per pair of positions."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...functional.sums.band import causal_sums
from ...functional.sums.gates import Gate, apply_gate
from ...functional.sums.softmax import Sums, over_visible, split_heads64
from ...functional.sums.weights import Dense
from ...positions import PairPositions, build_pair_positions
from ..base import Capabilities, Facts, Mixer
from ..key_blocks import KeyBlock, KeyBlocks
from .aft import check_pair_bias, queries
from .pair_bias import PairBias, pair_positions_of


class PairBiased(Mixer):
    """AFT with a bias w_ts per pair of positions; the base class of AFT-full and AFT-local.

    The bias is learned for each pair of ``max_len`` positions, or a function of positions, which has no longest one.
    """

    facts = Facts(needs_one_of=("max_len", "bias"))
    bias: PairBias | PairPositions

    def resize(self, max_len: int, max_context_len: int | None = None) -> None:
        """Interpolate the bias to ``max_len`` positions of queries and ``max_context_len`` of keys.

        A window keeps its size.
        """
        bias, most = self._table(), max_context_len or max_len
        bias.resize(max_len, most)
        self.max_len, self.max_context_len = max_len, most

    def resize_grid(self, old: tuple[int, int], new: tuple[int, int], prefix: int) -> None:
        """Interpolate the bias as images.

        The biases of the ``prefix`` tokens stay; the grid of patches changes from size ``old`` to size ``new``.
        """
        self._table().resize_grid(old, new, prefix)
        self.max_len = self.max_context_len = prefix + prod(new)

    def pair_log_weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return w_ts for queries at positions (B, T) and keys at positions (B, S).

        Returns:
            (B, T, S) in float64; -inf for pairs that the mixer does not attend.
        """
        w = self.log_weights(queries, keys, torch.float64).expand(queries.shape[0], -1, -1)
        return w.masked_fill(keys[:, None] > queries[:, :, None], -torch.inf) if self.causal else w

    def build_bias(
        self,
        bias: dict[str, Any] | None,
        max_len: int | None,
        max_context_len: int | None,
        rank: int | None,
        init_std: float,
        *,
        empty: bool = False,
    ) -> PairBias | PairPositions:
        """Build the bias; a function of positions makes the options of a learned one moot."""
        if bias is not None:
            self.max_len = self.max_context_len = None
            return build_pair_positions(bias, 1, owner=type(self).__name__)
        if max_len is None:
            self.refuse("needs max_len, the number of positions that its bias covers, or a bias that is a function")
        check_pair_bias(self, max_len, max_context_len, rank, init_std)
        options: dict[str, Any] = {"rank": rank, "init_std": init_std, "empty": empty, "owner": type(self).__name__}
        return PairBias(max_len, max_context_len or max_len, **options)

    def _table(self) -> PairBias:
        if isinstance(self.bias, PairPositions):
            self.refuse("its bias is a function of positions, with nothing to resize")
        return self.bias

    def weights(
        self, x: Tensor, context: Tensor | None, positions: Tensor | None, key_mask: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return w as the functional forms take it."""
        if not isinstance(self.bias, PairPositions):
            return self.bias.between(x, context, positions, key_mask)
        if positions is None and key_mask is None:
            keys = x.shape[1] if context is None else context.shape[1]
            return self.bias((0, x.shape[1]), keys, x.dtype, x.device)[0, 0]
        return self.bias(*pair_positions_of(x, context, positions, key_mask), x.dtype)[:, 0]

    def log_weights(self, rows: Tensor, cols: Tensor, dtype: torch.dtype) -> Tensor:
        """Return w (1 or B, T, S) for positions of queries and keys; a function of them is at least float32."""
        if isinstance(self.bias, PairPositions):
            return self.bias(rows, cols, dtype)[:, 0]
        return self.bias.table(rows, cols).to(dtype)

    def taps(self, x: Tensor, window: int) -> Tensor:
        """Return the log-weights by distance (n,), from t - s = window - 1 on, as the functional form takes them."""
        assert isinstance(self.bias, PairPositions)
        return self.bias.taps(window - 1, window if self.causal else 2 * window - 1, x.dtype, x.device)[0]

    def decay(self, x: Tensor, gaps: Tensor | None) -> Tensor:
        """Return the log-decay of each token (B, T, D): -m times the positions since the valid token before."""
        assert isinstance(self.bias, PairPositions)
        gaps = torch.ones(1, 1, dtype=torch.long, device=x.device) if gaps is None else gaps
        far = gaps.flatten()[:, None]
        return self.bias(far, torch.zeros_like(far), x.dtype).view(*gaps.shape, 1).expand(*x.shape).to(x.dtype)


class FullBlocks(KeyBlocks, PairBiased):
    """The blocks of keys of AFT-full whose bias does not decay."""

    gate: Gate | None
    features_apart = True

    @property
    def decays(self) -> bool:
        """Return whether the bias falls linearly with the distance, so that sums of all keys stream by decaying."""
        return isinstance(self.bias, PairPositions) and self.bias.slopes() is not None

    def narrow_capabilities(self, can: Capabilities) -> Capabilities:
        return replace(super().narrow_capabilities(can), key_blocks=not self.decays)

    def block_keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.k_proj(x)
        return keys.clamp_min(torch.finfo(keys.dtype).min), self.v_proj(x)  # a key of -inf has weight 0

    def block_queries(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.zeros_like(x) if self.gate is None else queries(self, x)

    def block_sums(self, q: Tensor, positions: Tensor, block: KeyBlock, *, causal: bool) -> Sums:
        k, v = split_heads64(block.keys, block.values, block.valid, 1)
        w = self.log_weights(positions, block.positions, torch.float64)[:, None]
        return causal_sums(k, v, Dense(w)) if causal else over_visible(k, v, w)

    def gate_means(self, q: Tensor, y: Tensor) -> Tensor:
        return apply_gate(q, y, self.gate)
