"""Memory-compressed attention as a layer.

Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional.attention import attention
from ..functional.layout.masks import zero_masked
from ..functional.layout.positions import drop_padding, fill_from_last_valid, gather_tokens, last_valid
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer, chunk_positions, register_state
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least
from ..mixers.parts.shared import add_projections, check_positions, has_holes, in_pieces, largest_dot, valid_mask
from ..mixers.parts.weights_on_call import ReadConv1d, child_weights
from .memory_compressed_forms import Slots, fold_slots, memory_compressed, over_slots
from .parts.cells import cells_of, patches, strided_conv


@register_state
class MemoryCompressedState(NamedTuple):
    """The compressed blocks so far, and the last tokens as they are.

    keys, values (B, n, D), valid (B, n), cells (B, n): sums of the blocks, whether each has valid tokens, and the
    blocks' numbers. near_keys, near_values (B, r, D), near_valid, near_positions (B, r): the last tokens. scattered (B,
    0), or (B, 1) once positions were given: then each token keeps a slot, because it may be alone in its block.
    position (B,): the next one. r stays between b - 1 and 2 b - 2, and n grows by 1 with every b tokens; in mode
    "local" n is 0 and r is b - 1.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    cells: Tensor
    near_keys: Tensor
    near_values: Tensor
    near_valid: Tensor
    near_positions: Tensor
    scattered: Tensor
    position: Tensor


class MemoryCompressed(Mixer):
    """Attention inside blocks of b positions, or over keys and values that a convolution shortens b times.

    Liu et al. 2018, arXiv:1801.10198. Maps (B, T, D) to (B, T, D). The paper alternates both from layer to layer: build
    some layers with ``mode="local"``.

    Args:
        mode: "compressed" (default): all queries over shortened keys and values; "local": attention inside each block.
        block: b, in tokens. None: 3 for compressed and 256 for local, as in the paper.
        heads: number of heads, 8 by default; must divide dim.

    The convolutions are dense, dim to dim, one for keys and one for values, after the projections and before the heads
    are split. The streaming state of the compressed form keeps 1 / b of the history.

    Parameters: q_proj, k_proj, v_proj, out_proj; k_conv and v_conv (kernel and stride b) in the compressed form. Time
    O(T^2 D / b + T D^2), local O(T b D).

    Deviations: the causal compressed form is ours: a token attends one compressed key for each block before its own,
    and the tokens of its own block up to itself.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        fixed_when_traced=True,
        waivers={
            "past_reaches_present": "with mode='local' the first token of a block attends itself alone; "
            "the compressed form keeps the promise (test_memory_compressed.py)",
            "token_before_reaches": "with mode='local' the first token of a block attends itself alone; "
            "the compressed form keeps the promise (test_memory_compressed.py)",
        },
        about=About(
            "Liu et al. 2018, arXiv 1801.10198", "fixed pattern, memory", "T^2 D / b + T D^2, local T b D", "T D"
        ),
        form=memory_compressed,
        carries=QKVO,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        mode: str = "compressed",
        block: int | None = None,
        heads: int = 8,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        if mode not in ("compressed", "local"):
            self.refuse(f"mode={mode!r}; choose 'compressed' or 'local'")
        self.mode, self.heads = mode, heads
        self.block = (3 if mode == "compressed" else 256) if block is None else block
        at_least(self, 1, block=self.block)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        short = mode == "compressed"
        self.k_conv = ReadConv1d(dim, dim, self.block, stride=self.block) if short else None
        self.v_conv = ReadConv1d(dim, dim, self.block, stride=self.block) if short else None

    def _conv(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.k_conv is None or self.v_conv is None:
            return ()
        (k, k_bias), (v, v_bias) = (child_weights(self, conv, x) for conv in (self.k_conv, self.v_conv))
        return k, v, k_bias, v_bias

    def waived(self):
        return dict(self.facts.waivers) if self.mode == "local" else {}

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``memory_compressed`` for this input: (positional, keyword)."""
        x, positions, key_mask = inputs.x, inputs.positions, inputs.key_mask
        check_positions(self, positions, key_mask, rising=self.causal)
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x), self._conv(x)
        options = {"heads": self.heads, "block": self.block, "mode": self.mode, "positions": positions}
        return args, {**options, "causal": self.causal, "key_mask": key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        D, b, token = self.dim, self.block, 8 * self.dim + 9
        if self.mode == "local":
            size = min(b, T)
            flops = 4 * -(-T // size) * size * size * D
            return MixingCost(flops=flops, counted=flops, activations=4 * 6 * T * D, state=(b - 1) * token + 8)
        n = -(-T // b)
        flops = 4 * n * b * D * D + 4 * T * n * D
        kept = 4 * 6 * T * D + 8 * 2 * T * D + 8 * 2 * b * D * D
        return MixingCost(flops=flops, counted=flops, activations=kept, state=(1 + T // b + b - 1 + T % b) * token + 8)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, k, _, conv = args
        valid = options["key_mask"]
        if valid is not None:
            valid, k, q = drop_padding(valid, k, q)
        k, found = zero_masked(k.detach(), valid), 0.0
        if not conv or options["causal"]:
            found = largest_dot(q, k, options["heads"])
        if conv:
            # A cell is a sum whose terms may cancel; what they are rounded by does not.
            weight, bias = (a.detach().abs() for a in (conv[0], conv[2]))
            cells = strided_conv(patches(k.abs(), (k.shape[1],), options["block"]), weight, bias)
            found = max(found, largest_dot(q.detach().abs().double(), cells, options["heads"]))
        return found

    def empty_state(self, batch_size, *, device, dtype):
        def empty_history(length):
            tokens, flags = (
                torch.zeros(batch_size, length, self.dim, device=device, dtype=dtype),
                torch.zeros(batch_size, length, device=device),
            )
            return tokens, tokens.clone(), flags.bool(), flags.long()

        slots, near = empty_history(1 if self.mode == "compressed" else 0), empty_history(self.block - 1)
        position = torch.zeros(batch_size, dtype=torch.long, device=device)
        return MemoryCompressedState(
            *slots, *near, torch.zeros(batch_size, 0, dtype=torch.bool, device=device), position
        )

    def state_lengths(self):
        if self.mode == "local":
            return {"scattered": "rows with positions"}
        return {name: "near" if name.startswith("near") else "slots" for name in MemoryCompressedState._fields[:8]} | {
            "scattered": "rows with positions"
        }

    def mix_chunk(self, x, state, *, positions, key_mask):
        check_positions(self, positions, key_mask, rising=True, past=(state.near_valid, state.near_positions))
        (query_positions, next_position), valid = (
            chunk_positions(state.position, x, positions, key_mask),
            valid_mask(x, key_mask),
        )
        holes = has_holes(state.near_valid, key_mask)
        if (positions is not None or holes) and state.scattered.shape[1] == 0:
            state = state._replace(scattered=torch.ones_like(state.position[:, None], dtype=torch.bool))
        if positions is not None or holes:
            # masked tokens stay in the current block, so that they do not close it
            position_runs, valid_runs = (
                [self.block * state.cells[:, -1:], state.near_positions, query_positions],
                [state.valid[:, -1:], state.near_valid, valid],
            )
            query_positions = fill_from_last_valid(torch.cat(position_runs, 1), torch.cat(valid_runs, 1))[
                :, -x.shape[1] :
            ]
        y, state = in_pieces(partial(self._mix_piece, holes=holes), x, state, query_positions, valid)
        return self.out_proj(y), state._replace(position=next_position)

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        dtype = state.keys.dtype
        new = self.k_proj(x).to(dtype), self.v_proj(x).to(dtype), valid, positions
        recent = tuple(torch.cat(pair, 1) for pair in zip(state[4:8], new, strict=True))
        q, extra = self.q_proj(x), recent[0].shape[1] - (self.block - 1)
        if self.mode == "local":
            y = self._local(q, recent)
            recent = self._move_masked_first(recent, state) if holes else recent
            return y, state._replace(**dict(zip(state._fields[4:8], (a[:, extra:] for a in recent), strict=True)))
        slots = Slots(*state[:4])
        y = over_slots(q, slots, recent, self._conv(x), heads=self.heads, block=self.block)
        recent = self._move_masked_first(recent, state) if holes else recent
        step = 1 if state.scattered.shape[1] else self.block
        leaving = extra // step * step
        if leaving:
            slots = fold_slots(slots, tuple(a[:, :leaving] for a in recent), self._conv(x), block=self.block, step=step)
        return y, MemoryCompressedState(*slots, *(a[:, leaving:] for a in recent), *state[8:])

    def _move_masked_first(self, recent, state):
        """Return the recent tokens with masked ones moved before all valid ones.

        Masked tokens then belong to the block before.
        """
        keys, values, valid, positions = recent
        index, there, _ = last_valid(valid, valid.shape[1])
        before = self.block * state.cells[:, -1:] if state.cells.shape[1] else 0
        return (
            gather_tokens(keys, index),
            gather_tokens(values, index),
            there,
            torch.where(there, gather_tokens(positions, index), before),
        )

    def _local(self, q, recent):
        k, v, valid, positions = recent
        cell = cells_of(positions, self.block)[0]
        near = (cell[:, -q.shape[1] :, None] == cell[:, None]) & valid[:, None]
        return attention(
            q,
            zero_masked(k, valid).to(q.dtype),
            zero_masked(v, valid).to(q.dtype),
            heads=self.heads,
            causal=True,
            attn_mask=near,
        )
