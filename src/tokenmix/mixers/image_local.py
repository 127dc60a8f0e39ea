"""Local attention of the Image Transformer (Parmar et al. 2018, arXiv 1802.05751), in one and two dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from .. import functional
from .base import QKVO, About, Arguments, Mixer
from .cost import MixingCost
from .parts.history import empty_history, join_rings, joined, newest
from .parts.options import at_least, one_of
from .parts.shared import add_projections, check_positions, largest_dot, ring_chunk, row_starts


class ImageLocal(Mixer):
    """Image Transformer: softmax attention of each block of queries over one memory block.

    Parmar et al. 2018, arXiv:1802.05751, Sec. 3.2. Maps (B, T, D) to (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim.
        ndim: 1 (default): positions j l_q .. (j + 1) l_q - 1 attend themselves and the l_m before them. 2: blocks of
            h_q x w_q pixels attend themselves, h_m rows above and w_m columns to the left and to the right.
        block: l_q, or [h_q, w_q], in tokens; one number stands for both. Default 16.
        memory: l_m, or [h_m, w_m], in tokens. Default 16. With 0, blocks do not interact, and the first token of a
            block has no past.
        width: with ndim=2, pixels per line of tokens that come as a sequence in raster order, causal or not. None: the
            size of the grid is given at call time.

    The causal form follows raster order: a pixel attends the tokens of its memory block up to itself. The streaming
    state is a ring of the last block + memory tokens, in two dimensions of as many lines.

    Parameters: q_proj, k_proj, v_proj, out_proj. Time O(T (block + memory) D).

    Raises:
        MixerError: if an option is out of its range, or if the causal form in two dimensions has no width.
    """

    supports_causal = supports_streaming = supports_attn_mask = supports_grid = True
    fixed_when_traced = True
    supports_segments = True
    waivers = {
        "token_before_reaches": "with ndim=2 the token before the first one of a line is at the other edge of "
        "the image, and with memory=0 the token before the first one of a block is not attended"
    }
    about = About(
        "Parmar et al. 2018, arXiv 1802.05751", "fixed pattern", "T (block + memory) D", "T heads (block + memory)"
    )
    form = "image_local"
    carries = QKVO

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        ndim: int = 1,
        block: int | list[int] = 16,
        memory: int | list[int] = 16,
        width: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        one_of(self, (1, 2), ndim=ndim)
        self.heads, self.ndim, self.width = heads, ndim, width
        self.block, self.memory = self._sizes(1, block=block), self._sizes(0, memory=memory)
        if width is not None and ndim == 1:
            self.refuse(f"width needs ndim=2, got width={width!r}, ndim={ndim}")
        if width is not None:
            at_least(self, 1, width=width)
        if causal and ndim == 2 and width is None:
            self.refuse(
                "causal=True with ndim=2 needs width, the pixels per line; a grid given at call time has no causal form"
            )
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)

    def _sizes(self, low: int, **given: int | list[int]) -> tuple[int, ...]:
        """Return one size per axis."""
        ((name, sizes),) = given.items()
        found = tuple(sizes) if isinstance(sizes, list | tuple) else (sizes,) * self.ndim
        if len(found) != self.ndim:
            self.refuse(f"{name} must be one integer, or ndim={self.ndim} of them, got {sizes!r}")
        for size in found:
            at_least(self, low, **{name: size})
        return found

    def waived(self):
        return {} if self.ndim == 1 and self.memory[0] else dict(self.waivers)

    @property
    def on_grid(self) -> bool:
        """Return whether the size of the grid is given at call time."""
        return self.ndim == 2 and self.width is None

    @property
    def capabilities(self):
        """Return the features of this instance: it takes a grid if ndim is 2 and no width was given."""
        return replace(super().capabilities, grid=self.on_grid)

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
        """Return the arguments of ``functional.image_local`` for this input: (positional, keyword)."""
        check_positions(self, positions, key_mask)
        if grid is not None and not self.on_grid:
            self.refuse(
                f"was built with ndim={self.ndim}, width={self.width} and mixes a sequence, got grid={tuple(grid)}"
            )
        if self.on_grid and (grid is None or len(grid) != 2):
            self.refuse(f"was built with ndim=2 and without width and needs grid=(H, W), got grid={grid}")
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        place = {"width": self.width, "grid": grid, "prefix": prefix, "positions": positions}
        starts = None if self.on_grid else row_starts(key_mask, positions)
        return args, {
            **self._pattern(),
            **place,
            "starts": starts,
            "causal": self.causal,
            "key_mask": key_mask,
            "attn_mask": attn_mask,
        }

    def _pattern(self):
        return {"heads": self.heads, "block": self.block, "memory": self.memory}

    @property
    def _ring(self) -> int:
        """Return how many tokens back the memory of a query block reaches; the state holds as many."""
        if self.ndim == 1:
            return self.block[0] + self.memory[0] - 1
        return (self.block[0] + self.memory[0]) * (self.width or 0) - 1

    def mixing_cost(self, T: int) -> MixingCost:
        D, queries, keys = self.dim, 1, 1
        for axis, (size, reach) in enumerate(zip(self.block, self.memory, strict=True)):
            queries, keys = queries * size, keys * (size + reach + (reach if axis else 0))
        blocks = -(-T // queries)
        pairs = blocks * queries * keys
        return MixingCost(
            4 * pairs * D,
            None,
            activations=4 * (8 * T * D + 2 * blocks * keys * D + pairs * self.heads),
            state=(8 * D + 9) * self._ring + 8,
        )

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return largest_dot(args[0], args[1], options["heads"])

    def empty_state(self, batch_size, *, device, dtype):
        return empty_history(batch_size, self.dim, self._ring, device=device, dtype=dtype)

    @property
    def halo(self):
        return self._ring

    @property
    def only_halo(self):
        return True

    def join_states(self, earlier, later, fade):
        return join_rings(earlier, later)[0]

    def mix_chunk(self, x, state, *, positions, key_mask):
        return ring_chunk(self, x, state, positions=positions, key_mask=key_mask)

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        state, q = joined(state, valid, positions, keys=self.k_proj(x), values=self.v_proj(x)), self.q_proj(x)
        options = {
            **self._pattern(),
            "width": self.width,
            "positions": (positions, state.positions),
            "causal": True,
            "key_mask": state.valid,
        }
        y = functional.image_local(q, state.keys.to(q.dtype), state.values.to(q.dtype), **options)
        return y, newest(state, self._ring, holes=holes)
