"""BigBird (Zaheer et al. 2020): global, window and random blocks.

As in ``patterns``: by blocks at default positions, a masked dense form with explicit ``positions`` or S != T.
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
    blockwise,
    check,
    cut,
    dense,
    merge_heads,
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
from ..mixers.parts.patterns import BlockCost, bias_options, build_distance_bias, history_step, kept_bytes
from ..mixers.parts.shared import add_projections, check_positions, largest_added, largest_dot
from .parts.global_tokens import to_all, to_first, without_first

BITS = (1 << 31) - 1


@exact
def bigbird(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    window_blocks: int,
    random_blocks: int,
    global_blocks: int,
    seed: int,
    heads: int,
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Positions | None = None,
    added: ByDistance | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend from each block of queries to blocks around it, to global blocks, and to random ones.

    These are ``window_blocks`` blocks around it, the first ``global_blocks`` blocks, and ``random_blocks`` more. Tokens
    of global blocks attend everything (BigBird-ITC). Causal: only s <= t of all that. ``random_choice`` draws the
    random blocks of query block i and head h among the blocks of the row that are neither global nor in the window;
    when causal, among those before the window.

    Args:
        window_blocks: odd: (window_blocks - 1) / 2 blocks on each side of the own one; when causal only those before
            it.
        positions: as in ``functional.local``; blocks start at each row's position 0, and the row ends with its last
            valid key.
        added: as in ``patterns.strided``.

    Time and memory O(T block (window_blocks + random_blocks + global_blocks) D) at default positions.
    """
    check(
        "bigbird",
        q,
        k,
        v,
        heads,
        backend,
        block=block,
        window_blocks=window_blocks,
        random_blocks=random_blocks + 1,
        global_blocks=global_blocks + 1,
    )
    if window_blocks % 2 == 0:
        raise MixerError(f"bigbird: window_blocks={window_blocks} must be odd: the own block and as many on each side.")
    if 0 in (q.shape[1], k.shape[1]):
        return torch.zeros_like(q)
    draw = {"window": window_blocks // 2, "first": global_blocks, "heads": heads, "count": random_blocks, "seed": seed}
    if positions is not None or q.shape[1] != k.shape[1]:
        positions = own_positions(q, k, key_mask) if positions is None else positions
        rows, cols, ok = pairs_of(positions, q, k, causal=causal, key_mask=key_mask, attn_mask=None)
        pattern = _blocks_seen(rows, cols, block, None if causal else _length(cols[:, 0], key_mask), draw)
        return merge_heads(
            dense(prepare_blocks(q, k, v, heads, key_mask, added), pattern & ok[:, None], rows - cols), q
        )

    form = partial(_bigbird_blocks, block=block, side=window_blocks // 2, draw=draw, causal=causal, added=added)
    return in_order(form, (q, k, v), key_mask)


def _bigbird_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    *,
    block: int,
    side: int,
    draw: dict[str, int],
    causal: bool,
    added: ByDistance | None,
) -> Tensor:
    """Compute ``bigbird`` where index = position."""
    r, T = prepare_blocks(q, k, v, draw["heads"], key_mask, added), q.shape[1]
    index, g = torch.arange(T, device=q.device), min(draw["first"] * block, T)
    window = r._replace(valid=without_first(r, g))
    parts = [blockwise(*window, block, side, 0 if causal else side, _causal_pairs if causal else _all)]
    if g:
        parts.append(to_first(r, g, index, causal))
    if draw["count"]:
        i = torch.arange(-(-T // block), device=q.device)[None]
        end = i + 1 if causal else _blocks_of(_length(index[None], key_mask), block)
        parts.append(_random_part(r, random_choice(i, end, **draw), block))
    y = ratio(*parts)
    if g and not causal:
        y = torch.cat([to_all(r._replace(q=r.q[:, :, :g]), False), y[:, :, g:]], 2)
    return merge_heads(y, q)


def _causal_pairs(rows: Tensor, cols: Tensor) -> Tensor:
    return cols <= rows


def _all(rows: Tensor, cols: Tensor) -> Tensor:
    return (rows >= 0) & (cols >= 0)


def _length(positions: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return the position after the last valid key of each row, (B, 1)."""
    there = positions if key_mask is None else torch.where(key_mask, positions, -1)
    return there.amax(1, keepdim=True) + 1


def _blocks_of(length: Tensor, block: int) -> Tensor:
    return torch.div(length + block - 1, block, rounding_mode="floor")


def _blocks_seen(rows: Tensor, cols: Tensor, block: int, length: Tensor | None, draw: dict[str, int]) -> Tensor:
    """Return the pairs (B, H, T, S) of the pattern, at positions rows (B, T, 1) and cols (B, 1, S).

    length (B, 1) is that of each row, or None when causal.
    """
    i, j = (torch.div(a, block, rounding_mode="floor") for a in (rows, cols))
    seen = ((i - j).abs() <= draw["window"]) | (i < draw["first"]) | (j < draw["first"])
    seen = seen[:, None].expand(-1, draw["heads"], -1, -1)
    if draw["count"]:
        chosen = random_choice(i[..., 0], i[..., 0] + 1 if length is None else _blocks_of(length, block), **draw)
        seen = seen | (chosen[..., None] == j[:, None, :, None, :]).any(-2)
    return seen


def random_choice(i: Tensor, end: Tensor, *, window: int, first: int, heads: int, count: int, seed: int) -> Tensor:
    """Draw the random blocks (B, H, n, count) of query blocks i (B, n), -1 where there is none.

    They depend on seed, head, i and ``end`` only. The candidates are the blocks first .. end - 1 outside i - window ..
    i + window, in order. They are cut into ``count`` equal stretches, and a number hashed from (seed, head, i, slot)
    picks one of each, so that the choices differ from one another.
    """
    low = (i - window).clamp_min(first)
    inside = (torch.minimum(i + window + 1, end) - low).clamp_min(0)
    candidates = (end - first - inside).clamp_min(0)[:, None, :, None]
    slot, head = torch.arange(count, device=i.device), torch.arange(heads, device=i.device)[:, None, None]
    start, stop = (torch.div(candidates * s, count, rounding_mode="floor") for s in (slot, slot + 1))
    number = _hash_numbers(i[:, None, :, None] * 7919 + head * 104729 + slot * 1299709 + (seed & BITS) * 15485863)
    pick = start + ((number * (stop - start)) >> 31)
    chosen = first + pick
    chosen = torch.where(chosen >= low[:, None, :, None], chosen + inside[:, None, :, None], chosen)
    return torch.where(stop > start, chosen, -1)


def _hash_numbers(x: Tensor) -> Tensor:
    """Hash to numbers below 2^31; the constants keep all products below 2^62."""
    x = x & BITS
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        x = ((x ^ (x >> shift)) * factor) & BITS
    return x ^ (x >> 15)


def _random_part(r: Ready, chosen: Tensor, block: int) -> PartialSums:
    """Attend from each block of queries to its chosen (B or 1, H, n, count) blocks."""
    (B, H, T, _), n, count = r.q.shape, chosen.shape[2], chosen.shape[3]
    drawn, chosen = chosen, chosen.expand(B, H, n, count)
    index = chosen.clamp_min(0).flatten(2)[..., None]
    k, v = (
        cut(a, n, block)
        .flatten(-2)
        .gather(2, index.expand(-1, -1, -1, block * a.shape[-1]))
        .view(B, H, n, count * block, a.shape[-1])
        for a in (r.k, r.v)
    )
    inside = (
        (torch.arange(n * block, device=r.q.device) < T).view(1, 1, n, block)
        if r.valid is None
        else cut(r.valid[..., None], n, block).squeeze(-1)
    )
    valid = inside.expand(B, H, n, block).gather(2, index.expand(-1, -1, -1, block)).view(B, H, n, count, block)
    ok = (valid & (chosen >= 0)[..., None]).flatten(-2)[..., None, :]
    added = None
    if r.added is not None:
        place = torch.arange(n * block, device=r.q.device)
        keys = (drawn.clamp_min(0)[..., None] * block + place[:block]).flatten(3)
        far = place.view(n, block, 1) - keys[:, :, :, None]  # (B or 1, H, n, block, count * block)
        every = r.added(torch.arange(-n * block, n * block + 1, device=r.q.device))
        added = torch.stack([every[h][far[:, h] + n * block] for h in range(H)], 1)
    return PartialSums(*(a.flatten(-3, -2)[..., :T, :] for a in part_of(cut(r.q, n, block), k, v, ok, added)))


class BigBird(Mixer):
    """BigBird: global, window and random blocks (the ITC form, in which tokens of the sequence are global).

    Zaheer et al. 2020, arXiv:2007.14062. Maps (B, T, D) to (B, T, D).

    Args:
        block: tokens per block, 64 by default.
        window_blocks: odd, 3 by default: the own block and (window_blocks - 1) / 2 blocks on each side, only those
            before when causal. From 3 on, a row always attends the token before it.
        random_blocks: number of further blocks for each block of queries and each head, all different, drawn by hash; 3
            by default.
        global_blocks: number of first blocks that all attend and that attend all, 2 by default.
        seed: seed of the random blocks, 0 by default. They depend on the seed, the head, the block and the number of
            blocks of the row (causal: the number of blocks before).
        heads: number of heads, 8 by default; must divide dim.
        bias: None (default), or a function of the distance that is added to the logits: {"name": "alibi", "t5",
            "kerple" or "sandwich"} with the options of the class in ``tokenmix.positions``.

    The causal form keeps only s <= t of all that.

    Parameters: q_proj, k_proj, v_proj, out_proj. Time and memory O(T block (w + r + g) D). The streaming state is the
    history of keys and values.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        fixed_when_traced=True,
        page="patterns",
        about=About("Zaheer et al. 2020, arXiv 2007.14062", "fixed pattern", "T b (w + r + g) D", "T b (w + r + g) H"),
        form=bigbird,
        carries=QKVO,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        block: int = 64,
        window_blocks: int = 3,
        random_blocks: int = 3,
        global_blocks: int = 2,
        seed: int = 0,
        heads: int = 8,
        bias: dict[str, Any] | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.block, self.window_blocks, self.random_blocks, self.global_blocks, self.seed, self.heads = (
            block, window_blocks, random_blocks, global_blocks, seed, heads,
        )  # fmt: skip
        at_least(self, 1, block=block, window_blocks=window_blocks)
        at_least(self, 0, random_blocks=random_blocks, global_blocks=global_blocks, seed=seed)
        if window_blocks % 2 == 0:
            self.refuse(f"window_blocks={window_blocks} must be odd: the own block and equally many on each side")
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.bias = build_distance_bias(self, bias, heads)

    def _pattern(self):
        names = ("block", "window_blocks", "random_blocks", "global_blocks", "seed", "heads")
        return {name: getattr(self, name) for name in names}

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``bigbird`` for this input: (positional, keyword)."""
        x, positions, key_mask = inputs.x, inputs.positions, inputs.key_mask
        check_positions(self, positions, key_mask)
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        options = {**self._pattern(), **bias_options(self.bias, x)}
        return args, {**options, "positions": positions, "causal": self.causal, "key_mask": key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        counts, D, g = BlockCost(T), self.dim, min(self.global_blocks * self.block, T)
        parts = [counts.blocks(self.block, self.window_blocks // 2)]
        parts += [counts.count_shared(g)] if g else []
        parts += [counts.count_chosen(self.block, self.random_blocks)] if self.random_blocks else []
        flops = sum(4 * D * p.pairs for p in parts) + 4 * D * g * T
        kept = kept_bytes(D, self.heads, T, parts, rows=g)
        biased = 0 if self.bias is None else self.heads * (sum(p.pairs for p in parts) + g * T)
        if self.bias is not None and self.random_blocks:  # the distances of the pairs in random blocks are kept
            kept += 8 * self.heads * parts[-1].pairs
        return MixingCost(flops=flops + biased, counted=flops, activations=kept, state=(8 * D + 9) * T + 8)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return largest_dot(args[0], args[1], options["heads"]) + largest_added(options, args[0].shape[1])

    def empty_state(self, batch_size, *, device, dtype):
        return empty_history(batch_size, self.dim, device=device, dtype=dtype)

    def mix_chunk(self, x, state, *, positions, key_mask):
        check_positions(self, positions, key_mask)
        return history_step(self, bigbird, x, state, self._pattern(), positions=positions, key_mask=key_mask)
