"""Attention over one block of keys at a time, for mixers that weight every pair of tokens.

The sums over separate blocks of keys, each scaled by its maximum, merge exactly into the sums over all keys. Queries
and keys may therefore lie on different machines, as in ring attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..functional.attention import ROWS
from ..functional.layout.masks import zero_masked
from ..functional.sums.nonfinite import add_nan_mask, clean, each_mark, marks, over_keys
from ..functional.sums.softmax import Sums, merge, merge_heads, ratio_of
from ..kernels.recompute import as_now
from .base import Facts, Mixer


class KeyBlock(NamedTuple):
    """The projected tokens of one stretch.

    keys, values (B, S, .), 0 where masked; valid (B, S) bool, True = may be attended; positions (B, S).
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor

    def part(self, start: int, stop: int | None) -> KeyBlock:
        """Return the tokens from ``start`` to ``stop``."""
        return KeyBlock(*(a[:, start:stop] for a in self))

    def pad_to(self, length: int) -> KeyBlock:
        """Return ``length`` tokens, the last of which are masked."""
        missing = length - self.valid.shape[1]
        return KeyBlock(*(F.pad(a, (0, 0) * (a.ndim - 2) + (0, missing)) for a in self))


class Reading:
    """The running sums of a set of queries over the blocks of keys added so far; made by ``Mixer.read_blocks``."""

    def __init__(self, mixer: Any, queries: Tensor, positions: Tensor):
        self.mixer, self.queries, self.positions = mixer, clean(queries), positions
        self._mark = each_mark if mixer.features_apart else marks
        self._met = self._mark(queries)
        self._pieces: list[Sums | None] = [None] * -(-queries.shape[1] // ROWS)

    def add(self, block: KeyBlock, *, own: bool = False) -> None:
        """Add a block of keys that all precede the queries, or with ``own`` the queries' own block, read causally."""
        mark = self._mark(block.keys, block.values)
        T = self.queries.shape[1]
        self._met = self._met + over_keys(mark, T, causal=own)
        block = block._replace(keys=clean(block.keys), values=clean(block.values))
        for i in range(len(self._pieces)):
            start, stop = i * ROWS, min((i + 1) * ROWS, T)
            if own:
                self._sum_block(i, block.part(start, stop), True)
                block_before = block.part(0, start)
            else:
                block_before = block
            if block_before.valid.shape[1]:
                self._sum_block(i, block_before, False)

    def _sum_block(self, i: int, block: KeyBlock, causal: bool) -> None:
        rows = slice(i * ROWS, (i + 1) * ROWS)
        given = self.queries[:, rows], self.positions[:, rows], block, causal
        again = torch.is_grad_enabled()  # pairs are computed again in the backward pass, not kept
        sums = Sums(*(checkpoint(as_now(self._sums), *given, use_reentrant=False) if again else self._sums(*given)))
        before = self._pieces[i]
        self._pieces[i] = sums if before is None else merge(before, sums)

    def _sums(self, queries: Tensor, positions: Tensor, block: KeyBlock, causal: bool) -> tuple[Tensor, ...]:
        return tuple(self.mixer.block_sums(queries, positions, block, causal=causal))

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs (B, T, D) of x, the tokens from which the queries were made."""
        parts = [merge_heads(ratio_of(sums)) for sums in self._pieces if sums is not None]
        y = self.mixer.gate_means(self.queries, torch.cat(parts, 1).to(x.dtype))
        return self.mixer.out_proj(add_nan_mask(y, self._met))


class KeyBlocks(Mixer):
    """A mixer that can read keys block by block; ``capabilities.key_blocks`` tells whether this instance can."""

    facts = Facts(key_blocks=True)
    features_apart: bool = False
    """Whether each output feature, before ``out_proj``, depends only on the same feature of keys and values."""

    def key_block(self, x: Tensor, positions: Tensor, key_mask: Tensor | None) -> KeyBlock:
        """Return the keys and values of x (B, L, D) at these positions (B, L)."""
        self._check_devices(x)
        self._check_input(x, "x")
        self._check_masks(x, x, key_mask, None)
        self._check_positions(x, positions)
        keys, values = self.block_keys(x, positions)
        valid = positions.new_ones(positions.shape, dtype=torch.bool) if key_mask is None else key_mask
        return KeyBlock(zero_masked(keys, key_mask), zero_masked(values, key_mask), valid, positions)

    def read_blocks(self, x: Tensor, positions: Tensor) -> Reading:
        """Begin the sums over blocks of keys for the queries of x (B, L, D) at these positions (B, L)."""
        return Reading(self, self.block_queries(x, positions), positions)

    def block_keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values (B, L, .) of x."""
        raise NotImplementedError

    def block_queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the queries (B, L, .) of x."""
        raise NotImplementedError

    def block_sums(self, queries: Tensor, positions: Tensor, block: KeyBlock, *, causal: bool) -> Sums:
        """Return the sums (B, heads, L, .) of at most ``ROWS`` queries over a block, all of it or causally."""
        raise NotImplementedError

    def gate_means(self, queries: Tensor, y: Tensor) -> Tensor:
        """Return the input of ``out_proj``, given the weighted means y (B, L, D)."""
        return y
