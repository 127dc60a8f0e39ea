"""The two fixed patterns of the Sparse Transformer (Child et al. 2019), strided and fixed.

Layout (B, T, heads * e). Self-mixing at default positions runs by blocks (``functional.layout.blocks``) and never makes
a T x T tensor; with explicit ``positions``, ``attn_mask``, or a number of keys other than that of queries, a masked
dense form runs. A query with nothing to attend gives exactly 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import MixerError
from ..functional.layout.blocks import (
    ByDistance,
    PartialSums,
    Ready,
    added_between,
    band,
    blockwise,
    check,
    cut,
    dense,
    in_classes,
    merge_heads,
    of_heads,
    own_positions,
    pairs_of,
    part_of,
    prepare_blocks,
    ratio,
)
from ..functional.layout.positions import Positions, in_order
from ..kernels.backend import Backend
from ..kernels.precision import exact
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer
from ..mixers.cost import MixingCost
from ..mixers.parts.history import empty_history
from ..mixers.parts.options import at_least
from ..mixers.parts.patterns import BlockCost, bias_options, build_distance_bias, explicit, history_step, kept_bytes
from ..mixers.parts.shared import add_projections, check_positions, largest_added, largest_dot


@exact
def strided(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    stride: int,
    heads: int,
    merged: bool = False,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    positions: Positions | None = None,
    added: ByDistance | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend in the strided pattern of the Sparse Transformer (Sec. 4.2).

    The pattern holds the last ``stride`` positions, and every ``stride``-th position.

    Args:
        merged: False: the first half of the heads attends |t - s| <= stride, the second half (t - s) mod stride = 0.
            True: every head attends both.
        positions: as in ``functional.local``; only their differences count.
        added: a bias by distance, added to the logits: it maps integers t - s of any shape to (heads, *shape).

    Time and memory O(T (stride + T / stride) D) at default positions.
    """
    check("strided", q, k, v, heads, backend, stride=stride)
    _check_halves("strided", heads, merged)
    if 0 in (q.shape[1], k.shape[1]):
        return torch.zeros_like(q)
    r = prepare_blocks(q, k, v, heads, key_mask, added)
    if positions is not None or attn_mask is not None or q.shape[1] != k.shape[1]:
        positions = own_positions(q, k, None) if positions is None else positions
        rows, cols, ok = pairs_of(positions, q, k, causal=causal, key_mask=key_mask, attn_mask=attn_mask)
        near, column = (rows - cols).abs() <= stride, torch.remainder(rows - cols, stride) == 0
        return merge_heads(dense(r, _by_half(near & ok, column & ok, heads, merged), rows - cols), q)

    one, two = _halves(r, heads, merged)
    lines = -(-q.shape[1] // stride)
    window = band(*one, back=stride, ahead=0 if causal else stride)
    lattice = in_classes(*two, stride, back=lines - 1, ahead=0 if causal else lines - 1, hole=1 if merged else -1)
    return merge_heads(_join_parts(window, lattice, merged), q)


@exact
def fixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    stride: int,
    columns: int,
    heads: int,
    merged: bool = False,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    positions: Positions | None = None,
    added: ByDistance | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend in the fixed pattern of the Sparse Transformer (Sec. 4.2).

    The pattern holds the own block of ``stride`` positions, and the last ``columns`` positions of every block.

    Args:
        merged: False: the first half of the heads attends floor(s / stride) = floor(t / stride), the second half
            s mod stride >= stride - columns. True: every head attends both.
        positions: as in ``functional.local``; blocks start at each row's position 0.
        added: as in ``strided``.

    Time and memory O(T (stride + columns T / stride) D) at default positions.
    """
    check("fixed", q, k, v, heads, backend, stride=stride, columns=columns)
    _check_halves("fixed", heads, merged)
    if columns > stride:
        raise MixerError(f"fixed: columns={columns} must be at most stride={stride}.")
    if 0 in (q.shape[1], k.shape[1]):
        return torch.zeros_like(q)
    r = prepare_blocks(q, k, v, heads, key_mask, added)
    if positions is not None or attn_mask is not None or q.shape[1] != k.shape[1]:
        positions = own_positions(q, k, key_mask) if positions is None else positions
        rows, cols, ok = pairs_of(positions, q, k, causal=causal, key_mask=key_mask, attn_mask=attn_mask)
        near = torch.div(rows, stride, rounding_mode="floor") == torch.div(cols, stride, rounding_mode="floor")
        column = torch.remainder(cols, stride) >= stride - columns
        return merge_heads(dense(r, _by_half(near & ok, column & ok, heads, merged), rows - cols), q)

    return in_order(
        partial(_fixed_blocks, stride=stride, columns=columns, heads=heads, merged=merged, causal=causal, added=added),
        (q, k, v),
        key_mask,
    )


def _fixed_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    stride: int,
    columns: int,
    heads: int,
    merged: bool,
    causal: bool,
    added: ByDistance | None,
) -> Tensor:
    """Compute ``fixed`` where index = position."""
    one, two = _halves(prepare_blocks(q, k, v, heads, key_mask, added), heads, merged)
    near = blockwise(*one, stride, 0, 0, lambda rows, cols: cols <= rows if causal else (cols >= 0) & (rows >= 0))
    return merge_heads(
        _join_parts(near, _attend_summaries(two, stride, columns, causal=causal, merged=merged), merged), q
    )


def _attend_summaries(r: Ready, stride: int, columns: int, *, causal: bool, merged: bool) -> PartialSums:
    """Attend from all queries to the last ``columns`` positions of every block.

    The own block is excluded where another part covers it.
    """
    T, device = r.q.shape[-2], r.q.device
    n, index = -(-T // stride), torch.arange(T, device=device)
    position = cut(index[:, None] + 1, n, stride)[:, stride - columns :].flatten() - 1  # -1 after the end
    k, v = (cut(a, n, stride)[..., stride - columns :, :].flatten(-3, -2) for a in (r.k, r.v))
    ok = (position >= 0) & (position <= index[:, None]) if causal else (position >= 0).expand(T, -1)
    if merged:
        block = torch.arange(n, device=device)[:, None]
        ok = ok & (block.expand(n, stride).flatten()[:T, None] != block.expand(n, columns).flatten())
    if r.valid is not None:
        ok = ok & cut(r.valid[..., None], n, stride)[..., stride - columns :, :].flatten(-3, -2).mT
    return part_of(r.q, k, v, ok, added_between(r.added, index[:, None] - position, T))


def _check_halves(who: str, heads: int, merged: bool) -> None:
    if not merged and heads % 2:
        raise MixerError(
            f"{who}: heads must be even, because each half takes one pattern, got {heads}; or use merged=True."
        )


def _halves(r: Ready, heads: int, merged: bool) -> tuple[Ready, Ready]:
    if merged:
        return r, r
    return of_heads(r, slice(heads // 2)), of_heads(r, slice(heads // 2, None))


def _join_parts(near: PartialSums, column: PartialSums, merged: bool) -> Tensor:
    return ratio(near, column) if merged else torch.cat([ratio(near), ratio(column)], 1)


def _by_half(near: Tensor, column: Tensor, heads: int, merged: bool) -> Tensor:
    """Combine both patterns (B, T, S) into the pairs that the heads allow."""
    if merged:
        return near | column
    second = torch.arange(heads, device=near.device)[:, None, None] >= heads // 2
    return second & column[:, None] | ~second & near[:, None]  # ONNX Runtime has no Where for bool


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

    facts = Facts(
        causal=True,
        streaming=True,
        attn_mask=True,
        fixed_when_traced=True,
        about=About("Child et al. 2019, arXiv 1904.10509", "fixed pattern", "T (l + T / l) D", "T (l + T / l) H"),
        form=strided,
        carries=QKVO,
    )

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
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.bias = build_distance_bias(self, bias, heads)
        if heads % 2 and not merged:
            self.refuse(
                f"each half of the heads uses one pattern, so heads must be even, got {heads}; or use merged=True"
            )

    def _pattern(self):
        return {"stride": self.stride, "heads": self.heads, "merged": self.merged}

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``strided`` for this input: (positional, keyword)."""
        x, positions, key_mask, attn_mask = inputs.x, inputs.positions, inputs.key_mask, inputs.attn_mask
        positions = explicit(x, positions, key_mask, attn_mask)
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return args, {
            **self._pattern(),
            **bias_options(self.bias, x),
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
        return history_step(self, strided, x, state, self._pattern(), positions=positions, key_mask=key_mask)


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

    facts = Facts(
        causal=True,
        streaming=True,
        attn_mask=True,
        fixed_when_traced=True,
        about=About("Child et al. 2019, arXiv 1904.10509", "fixed pattern", "T (l + c T / l) D", "T (l + c T / l) H"),
        form=fixed,
        carries=QKVO,
    )

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

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``fixed`` for this input: (positional, keyword)."""
        x, positions, key_mask, attn_mask = inputs.x, inputs.positions, inputs.key_mask, inputs.attn_mask
        check_positions(self, positions, key_mask)
        positions = explicit(x, positions, key_mask, attn_mask)
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return args, {
            **self._pattern(),
            **bias_options(self.bias, x),
            "positions": positions,
            "causal": self.causal,
            "key_mask": key_mask,
            "attn_mask": attn_mask,
        }

    def mixing_cost(self, T: int) -> MixingCost:
        counts, share = BlockCost(T), 1 if self.merged else 2
        parts = [counts.own_block(self.stride), counts.count_shared(-(-T // self.stride) * self.columns)]
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
        return history_step(self, fixed, x, state, self._pattern(), positions=positions, key_mask=key_mask)
