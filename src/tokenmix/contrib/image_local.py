"""Local attention of the Image Transformer (Parmar et al. 2018, arXiv 1802.05751), along the raster and in 2-D."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..functional.layout.masks import allowed, zero_masked
from ..functional.layout.positions import Positions, align_to_start, back_to_place
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs
from ..mixers.cost import MixingCost
from ..mixers.parts.history import append_tokens, empty_history, join_rings, keep_newest
from ..mixers.parts.options import at_least, one_of
from ..mixers.parts.shared import add_projections, check_positions, largest_dot, ring_chunk, row_starts
from ..mixers.segments import Segmented
from .parts.lines import Lines, Raster, coordinates, dense, in_lines


@exact
def image_local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    block: tuple[int, ...],
    memory: tuple[int, ...],
    width: int | None = None,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    positions: Positions | None = None,
    starts: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend from each block of queries to one memory block around it (Parmar et al. 2018, Sec. 3.2).

    Args:
        q: (B, T, D); k, v: (B, S, D); D = heads * e.
        block, memory: (l_q,) and (l_m,): positions j l_q .. (j + 1) l_q - 1 attend themselves and the l_m positions
            before them. Or (h_q, w_q) and (h_m, w_m): blocks of an image, whose memory reaches h_m rows above and w_m
            columns to the left and to the right.
        width: pixels in a line of the image, for tokens in raster order; or grid: (H, W) of the tokens after the first
            ``prefix``. Prefix tokens attend all tokens and are attended by all.
        positions: (B, T), or a pair (B, T) of queries and (B, S) of keys, if they are not the indices.
        starts: (B,), the index of position 0 in each row; tokens before it give 0.

    Returns:
        (B, T, D) in q's dtype; exactly 0 where a query has nothing to attend. Time O(T (block + memory) D) without
        positions and attn_mask.
    """
    _check(q, k, v, heads, block, memory, width, grid, backend)
    T, S, dtype = q.shape[1], k.shape[1], q.dtype
    if 0 in (T, S):
        return torch.zeros_like(q)
    k, v = zero_masked(k, key_mask), zero_masked(v, key_mask)
    wide = sum_dtype(q)
    q, k, v = (a.to(wide) for a in (q, k, v))
    raster = Raster(grid, width, prefix)
    if positions is not None or attn_mask is not None or S != T:
        ok = allowed(q.shape[0], T, S, causal=causal, key_mask=key_mask, attn_mask=attn_mask, device=q.device)
        return dense(q, k, v, ok & _memory_mask(positions, starts, raster, block, memory, T, S, q.device), heads).to(
            dtype
        )
    lines = (
        _blocks_1d(T, block[0], memory[0], q.device)
        if len(block) == 1
        else _blocks_2d(T, raster, block, memory, q.device)
    )
    if causal:
        lines = lines._replace(ok=lines.ok & (lines.keys[:, None] <= lines.queries[:, :, None]))
    if starts is None:
        return in_lines(q, k, v, lines, key_mask, heads, prefix).to(dtype)
    valid, q, k, v = align_to_start(starts, key_mask, q, k, v)
    return back_to_place(in_lines(q, k, v, lines, valid, heads, prefix), starts).to(dtype)


def _blocks_1d(T: int, size: int, memory: int, device: torch.device) -> Lines:
    """Return blocks of ``size`` tokens, each with the ``memory`` tokens before it."""
    padded = F.pad(torch.arange(T, device=device), (memory, -T % size), value=T)
    queries, keys = padded[memory:].unflatten(0, (-1, size)), padded.unfold(0, memory + size, size)
    return Lines(queries, keys, torch.ones(1, 1, 1, dtype=torch.bool, device=device))


def _blocks_2d(T: int, raster: Raster, block: tuple[int, ...], memory: tuple[int, ...], device: torch.device) -> Lines:
    """Return blocks of the image, each with the rows above and the columns beside it."""
    (h, w), (up, side) = block, memory
    cells = raster.cells(T, device)
    H, W = cells.shape
    padded = F.pad(cells, (side, side + -W % w, up, -H % h), value=T)
    inner = padded[up:, side : padded.shape[1] - side]
    queries, keys = (
        a.unfold(0, n, h).unfold(1, m, w).flatten(2).flatten(0, 1)
        for a, n, m in ((inner, h, w), (padded, up + h, w + 2 * side))
    )
    return Lines(queries, keys, torch.ones(1, 1, 1, dtype=torch.bool, device=device))


def _memory_mask(
    positions: Positions | None,
    starts: Tensor | None,
    raster: Raster,
    block: tuple[int, ...],
    memory: tuple[int, ...],
    T: int,
    S: int,
    device: torch.device,
) -> Tensor:
    """Return which keys lie in the memory block of which queries, by position: (B or 1, T, S)."""
    rows, cols = raster.positions(positions, starts, T, S, device)
    here, there = (coordinates(a, raster) if len(block) == 2 else (a - raster.prefix)[..., None] for a in (rows, cols))
    near = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    for axis, (size, reach) in enumerate(zip(block, memory, strict=True)):
        first = torch.div(here[..., axis], size, rounding_mode="floor") * size
        offset = there[:, None, :, axis] - first[:, :, None]
        near = near & (offset >= -reach) & (offset < size + (reach if axis == 1 else 0))
    return raster.with_prefix(near, rows, cols)


def _check(q, k, v, heads, block, memory, width, grid, backend) -> None:
    choose("image_local", backend, q)
    if q.ndim != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2] or heads < 1 or q.shape[-1] % heads:
        shapes = ", ".join(str(tuple(a.shape)) for a in (q, k, v))
        raise MixerError(
            f"image_local: expects q (B, T, D) and k, v (B, S, D) with heads={heads} dividing D, got {shapes}."
        )
    if len(block) not in (1, 2) or len(block) != len(memory) or min(block) < 1 or min(memory) < 0:
        given = f"block={block}, memory={memory}"
        raise MixerError(
            f"image_local: block and memory need 1 size each or 2, block >= 1 and memory >= 0; got {given}."
        )
    if len(block) == 2 and (width is None) == (grid is None):
        raise MixerError(f"image_local: 2-D blocks need either a width or a grid, got width={width}, grid={grid}.")
    if (grid is not None and len(grid) != 2) or (len(block) == 1 and (grid is not None or width is not None)):
        raise MixerError(
            f"image_local: a grid has 2 sizes and goes with 2-D blocks, got grid={grid}, width={width}, block={block}."
        )


class ImageLocal(Segmented):
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

    facts = Facts(
        causal=True,
        streaming=True,
        attn_mask=True,
        grid=True,
        fixed_when_traced=True,
        waivers={
            "token_before_reaches": "with ndim=2 the token before the first one of a line is at the other edge of "
            "the image, and with memory=0 the token before the first one of a block is not attended"
        },
        about=About(
            "Parmar et al. 2018, arXiv 1802.05751", "fixed pattern", "T (block + memory) D", "T heads (block + memory)"
        ),
        form=image_local,
        carries=QKVO,
    )

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
        return {} if self.ndim == 1 and self.memory[0] else dict(self.facts.waivers)

    @property
    def on_grid(self) -> bool:
        """Return whether the size of the grid is given at call time."""
        return self.ndim == 2 and self.width is None

    def narrow_capabilities(self, can):
        """Return the features of this instance; it takes a grid if ndim is 2 and no width was given."""
        return replace(can, grid=self.on_grid)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``image_local`` for this input: (positional, keyword)."""
        x, positions, key_mask, grid = inputs.x, inputs.positions, inputs.key_mask, inputs.grid
        check_positions(self, positions, key_mask)
        if grid is not None and not self.on_grid:
            self.refuse(
                f"was built with ndim={self.ndim}, width={self.width} and mixes a sequence, got grid={tuple(grid)}"
            )
        if self.on_grid and (grid is None or len(grid) != 2):
            self.refuse(f"was built with ndim=2 and without width and needs grid=(H, W), got grid={grid}")
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        place = {"width": self.width, "grid": grid, "prefix": inputs.prefix, "positions": positions}
        starts = None if self.on_grid else row_starts(key_mask, positions)
        return args, {
            **self._pattern(),
            **place,
            "starts": starts,
            "causal": self.causal,
            "key_mask": key_mask,
            "attn_mask": inputs.attn_mask,
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
        state, q = append_tokens(state, valid, positions, keys=self.k_proj(x), values=self.v_proj(x)), self.q_proj(x)
        options = {
            **self._pattern(),
            "width": self.width,
            "positions": (positions, state.positions),
            "causal": True,
            "key_mask": state.valid,
        }
        y = image_local(q, state.keys.to(q.dtype), state.values.to(q.dtype), **options)
        return y, keep_newest(state, self._ring, holes=holes)
