"""Fixed sparse patterns: the strided and the fixed pattern of the Sparse Transformer (Child et al. 2019)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import functional
from .base import QKVO, About, Arguments, Mixer
from .cost import MixingCost
from .parts.history import empty_history
from .parts.options import at_least, true_or_false
from .parts.patterns import BlockCost, added, build_distance_bias, explicit, history_step, kept_bytes
from .parts.shared import add_projections, check_positions, largest_added, largest_dot


class Strided(Mixer):
    """The strided pattern of the Sparse Transformer: the last positions, and every ``stride``-th position.

    Half of the heads attends the last ``stride`` positions, half every ``stride``-th position. Child et al. 2019,
    arXiv:1904.10509. Maps (B, T, D) to (B, T, D).

    Args:
        stride: l of the paper, 32 by default; the paper takes it near the square root of the length. The bidirectional
            form attends l positions on each side.
        heads: number of heads, 8 by default; must divide dim, and be even unless ``merged``.
        merged: True: every head attends both sets in one softmax (the paper's merged head). Default False.
        bias: None (default), or a function of the distance that is added to the logits: {"name": "alibi", "t5",
            "kerple" or "sandwich"} with the options of the class in ``tokenmix.positions``.

    Parameters: q_proj, k_proj, v_proj, out_proj, and those of the bias. Time O(T (l + T / l) D). The streaming state is
    the history of keys and values.

    Raises:
        MixerError: if an option is out of its range.
    """

    supports_causal = supports_streaming = supports_attn_mask = True
    fixed_when_traced = True
    about = About("Child et al. 2019, arXiv 1904.10509", "fixed pattern", "T (l + T / l) D", "T (l + T / l) H")
    form = "strided"
    carries = QKVO

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        stride: int = 32,
        heads: int = 8,
        merged: bool = False,
        bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.stride, self.heads, self.merged = stride, heads, merged
        at_least(self, 1, stride=stride)
        true_or_false(self, merged=merged)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.bias = build_distance_bias(self, bias, heads)
        if heads % 2 and not merged:
            self.refuse(
                f"each half of the heads uses one pattern, so heads must be even, got {heads}; or use merged=True"
            )

    def _pattern(self):
        return {"stride": self.stride, "heads": self.heads, "merged": self.merged}

    def functional_args(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Arguments:
        """Return the arguments of ``functional.strided`` for this input: (positional, keyword)."""
        positions = explicit(x, positions, key_mask, attn_mask)
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return args, {
            **self._pattern(),
            **added(self.bias, x),
            "positions": positions,
            "causal": self.causal,
            "key_mask": key_mask,
            "attn_mask": attn_mask,
        }

    def mixing_cost(self, T: int) -> MixingCost:
        counts, share = BlockCost(T), 1 if self.merged else 2
        parts = [counts.band(self.stride, self.stride), counts.columns(self.stride)]
        flops = sum(4 * self.dim * p.pairs for p in parts) // share
        biased = 0 if self.bias is None else sum(self.heads * p.pairs for p in parts) // share
        kept = kept_bytes(self.dim, self.heads, T, parts, share=share)
        return MixingCost(flops=flops + biased, counted=flops, activations=kept, state=(8 * self.dim + 9) * T + 8)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return largest_dot(args[0], args[1], options["heads"]) + largest_added(options, args[0].shape[1])

    def empty_state(self, batch_size, *, device, dtype):
        return empty_history(batch_size, self.dim, device=device, dtype=dtype)

    def mix_chunk(self, x, state, *, positions, key_mask):
        return history_step(self, functional.strided, x, state, self._pattern(), positions=positions, key_mask=key_mask)


class Fixed(Mixer):
    """The fixed pattern of the Sparse Transformer: the own block, and the last positions of every block.

    Half of the heads attends its own block, half the last ``columns`` positions of every block. Child et al. 2019,
    arXiv:1904.10509. Maps (B, T, D) to (B, T, D).

    Args:
        stride: l of the paper, the block size in tokens, 32 by default.
        columns: c of the paper, 4 by default; at most ``stride``.
        heads, merged, bias: as in Strided.

    Parameters: q_proj, k_proj, v_proj, out_proj, and those of the bias. Time O(T (l + c T / l) D). The streaming state
    is the history of keys and values.

    Raises:
        MixerError: if an option is out of its range.
    """

    supports_causal = supports_streaming = supports_attn_mask = True
    fixed_when_traced = True
    about = About("Child et al. 2019, arXiv 1904.10509", "fixed pattern", "T (l + c T / l) D", "T (l + c T / l) H")
    form = "fixed"
    carries = QKVO

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        stride: int = 32,
        columns: int = 4,
        heads: int = 8,
        merged: bool = False,
        bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.stride, self.columns, self.heads, self.merged = stride, columns, heads, merged
        at_least(self, 1, stride=stride, columns=columns)
        true_or_false(self, merged=merged)
        if columns > stride:
            self.refuse(f"columns={columns} must be at most stride={stride}")
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.bias = build_distance_bias(self, bias, heads)
        if heads % 2 and not merged:
            self.refuse(
                f"each half of the heads uses one pattern, so heads must be even, got {heads}; or use merged=True"
            )

    def _pattern(self):
        return {"stride": self.stride, "columns": self.columns, "heads": self.heads, "merged": self.merged}

    def functional_args(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Arguments:
        """Return the arguments of ``functional.fixed`` for this input: (positional, keyword)."""
        check_positions(self, positions, key_mask)
        positions = explicit(x, positions, key_mask, attn_mask)
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return args, {
            **self._pattern(),
            **added(self.bias, x),
            "positions": positions,
            "causal": self.causal,
            "key_mask": key_mask,
            "attn_mask": attn_mask,
        }

    def mixing_cost(self, T: int) -> MixingCost:
        counts, share = BlockCost(T), 1 if self.merged else 2
        parts = [counts.own_block(self.stride), counts.shared(-(-T // self.stride) * self.columns)]
        flops = sum(4 * self.dim * p.pairs for p in parts) // share
        kept, biased = kept_bytes(self.dim, self.heads, T, parts, share=share), 0
        if self.bias is not None:  # the distances of the columns are kept
            biased = sum(self.heads * p.pairs for p in parts) // share
            kept += 8 * parts[1].pairs
        return MixingCost(flops=flops + biased, counted=flops, activations=kept, state=(8 * self.dim + 9) * T + 8)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return largest_dot(args[0], args[1], options["heads"]) + largest_added(options, args[0].shape[1])

    def empty_state(self, batch_size, *, device, dtype):
        return empty_history(batch_size, self.dim, device=device, dtype=dtype)

    def mix_chunk(self, x, state, *, positions, key_mask):
        check_positions(self, positions, key_mask)
        return history_step(self, functional.fixed, x, state, self._pattern(), positions=positions, key_mask=key_mask)
