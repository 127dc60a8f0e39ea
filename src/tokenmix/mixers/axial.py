"""Axial attention (Ho et al. 2019, arXiv 1912.12180) as a layer: on grids, and causal in raster order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.axial import along
from ..functional.layout.lines import Raster
from ..functional.layout.positions import gather_tokens, last_valid
from .base import About, Arguments, Mixer, chunk_positions, register_state
from .cost import MixingCost
from .parts.hands_out import ReadLinear
from .parts.options import at_least, check_heads, one_of
from .parts.shared import check_positions, has_holes, in_pieces, largest_dot, row_starts, valid_mask


@register_state
class AxialState(NamedTuple):
    """What later tokens need of the current line and of the lines above.

    row (B, width, 5 D): q, k, v of the row stage and k, v of the inner stage for the last ``width`` tokens. column (B,
    width + S, 2 D): k, v of the column stage for ``width`` missing tokens and all S tokens so far; the last ``width``
    belong to unfinished lines. valid, positions (B, width + S). position (B,): the next one.
    """

    row: Tensor
    column: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


class Axial(Mixer):
    """Axial attention: softmax attention along the lines of a grid, one axis after the other.

    Ho et al. 2019, arXiv:1912.12180, Sec. 3. Maps (B, T, D) to (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim.
        ndim: number of axes of the grid, 2 (default) or 3.
        width: tokens per line, 16 by default, where tokens come as a sequence in raster order (ndim=2), causal or not.
            None: the size of the grid is given at call time.
        order: the axes in the order in which they are attended along. None: the last axis first, so along rows and then
            along columns.
        combine: "sequence" (default): each later stage projects the output of the stage before, like the stacked layers
            of the paper. "sum": one attention per axis on projections of x, added up.

    Causal: y = W_o [A_column(q_column; k, v of h) over the lines above + A_inner along the line up to the token], h =
    A_row over whole lines. Prefix tokens attend all tokens, and all tokens attend them, in each stage.

    Deviations: in the causal form the paper shifts the outputs of the columns down by one row and passes them through
    masked row attention; here the query in the line below attends the column itself, so that a missing token in the
    line above hides nothing of its column.

    Parameters: q_proj, k_proj, v_proj, stage_2 and stage_3 for the later stages, out_proj. Time O(T (H + W) D).

    Raises:
        MixerError: if an option is out of its range, or if the form is causal without raster order, rows first and
            ``combine="sequence"``.
    """

    supports_causal = supports_streaming = supports_grid = True
    about = About("Ho et al. 2019, arXiv 1912.12180", "fixed pattern", "T (H + W) D", "T (D + heads (H + W))")
    form = "axial"
    carries = ("out_proj",)

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        ndim: int = 2,
        width: int | None = 16,
        order: list[int] | None = None,
        combine: str = "sequence",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self._check_options(heads, ndim, width, order, combine)
        self.heads, self.ndim, self.width, self.combine = heads, ndim, width, combine
        self.order = tuple(reversed(range(ndim))) if order is None else tuple(order)
        queries, keys = (3, 2) if causal else (ndim, ndim) if combine == "sum" else (1, 1)
        self.q_proj = nn.Linear(dim, queries * dim, bias=qkv_bias)
        self.k_proj = nn.Linear(dim, keys * dim, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, keys * dim, bias=qkv_bias)
        self.stages = 0 if combine == "sum" else 1 if causal else ndim - 1
        for n in range(self.stages):
            self.register_module(f"stage_{n + 2}", ReadLinear(dim, (2 if causal else 3) * dim, bias=qkv_bias))
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)

    def _check_options(self, heads: int, ndim: int, width: int | None, order: list[int] | None, combine: str) -> None:
        check_heads(self, heads)
        one_of(self, (2, 3), ndim=ndim)
        one_of(self, ("sequence", "sum"), combine=combine)
        axes = list(order) if isinstance(order, list | tuple) else order
        if order is not None and axes not in [list(each) for each in permutations(range(ndim))]:
            self.refuse(f"order must name each of the ndim={ndim} axes once, got {order!r}")
        if width is not None and ndim != 2:
            self.refuse(
                f"width needs ndim=2, got width={width!r}, ndim={ndim}; with width=None the grid is given at call time"
            )
        if width is not None:
            at_least(self, 1, width=width)
        if self.causal and (width is None or combine == "sum" or axes not in (None, [1, 0])):
            self.refuse(
                f"causal=True needs a width, rows first and combine='sequence'; got {width=}, {order=}, {combine=}"
            )

    @property
    def capabilities(self):
        """Return the features of this instance: it takes a grid if no width was given."""
        return replace(super().capabilities, grid=self.width is None)

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
        """Return the arguments of ``functional.axial`` for this input: (positional, keyword)."""
        check_positions(self, positions, key_mask, rising=self.causal)
        if grid is not None and self.width is not None:
            self.refuse(
                f"was built with width={self.width} and mixes a sequence in raster order, got grid={tuple(grid)}"
            )
        if self.width is None and (grid is None or len(grid) != self.ndim):
            self.refuse(
                f"was built without width and needs grid=, the {self.ndim} sizes of the token grid, got grid={grid}"
            )
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x), self._later(x)
        place = {"width": self.width, "grid": grid, "prefix": prefix, "positions": positions}
        starts = None if self.width is None else row_starts(key_mask, positions)
        pattern = {"heads": self.heads, "order": self.order, "combine": self.combine}
        return args, {**pattern, **place, "starts": starts, "causal": self.causal, "key_mask": key_mask}

    def _later(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the weights and biases of the stages after the first."""
        maps = [self.read(self.get_submodule(f"stage_{n + 2}"), x) for n in range(self.stages)]
        return tuple(a for weight, *bias in maps for a in (weight, bias[0] if bias else x.new_zeros(len(weight))))

    def mixing_cost(self, T: int) -> MixingCost:
        """Compute the cost per row; a grid given at call time counts as a square or cube."""
        D, side = self.dim, max(1, round(T ** (1 / self.ndim)))
        sides = [side] * self.ndim if self.width is None else [-(-T // self.width), self.width]
        tokens = T if self.width is None else sides[0] * sides[1]
        pairs = tokens * (sum(sides) + (sides[1] if self.causal else 0))
        kept = 4 * (self.ndim * 8 * T * D + pairs * self.heads)
        state = (self.width or 0) * (20 * D) + ((self.width or 0) + T) * (8 * D + 9) + 8
        return MixingCost(4 * pairs * D, None, activations=kept, state=state)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        axes = len(options["order"]) if options["combine"] == "sum" else 1
        queries, keys = (3, 2) if options["causal"] else (axes, axes)
        return largest_dot(
            torch.cat(args[0].chunk(queries, -1), 1), torch.cat(args[1].chunk(keys, -1), 1), options["heads"]
        )

    def empty_state(self, batch_size, *, device, dtype):
        assert self.width is not None
        row = torch.zeros(batch_size, self.width, 5 * self.dim, device=device, dtype=dtype)
        positions = torch.zeros(batch_size, self.width, dtype=torch.long, device=device)
        return AxialState(
            row,
            row[..., : 2 * self.dim].clone(),
            positions.bool(),
            positions,
            torch.zeros(batch_size, dtype=torch.long, device=device),
        )

    def state_lengths(self):
        return {"column": "tokens", "valid": "tokens", "positions": "tokens"}

    def mix_chunk(self, x, state, *, positions, key_mask):
        check_positions(self, positions, key_mask, rising=True, past=(state.valid, state.positions))
        (query_positions, next_position), valid = (
            chunk_positions(state.position, x, positions, key_mask),
            valid_mask(x, key_mask),
        )
        mix_piece = (
            partial(self._mix_piece, holes=True)
            if has_holes(state.valid[:, -(self.width or 0) :], key_mask)
            else self._mix_piece
        )
        y, state = in_pieces(mix_piece, x, state, query_positions.clamp_min(0), valid)
        return self.out_proj(y), state._replace(position=next_position)

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        (q_row, q_column, q_inner), (k_row, k_inner), (v_row, v_inner) = (
            self.q_proj(x).chunk(3, -1),
            self.k_proj(x).chunk(2, -1),
            self.v_proj(x).chunk(2, -1),
        )
        new = torch.cat([q_row, k_row, v_row, k_inner, v_inner], -1)
        recent = torch.cat([state.row, new.to(state.row.dtype)], 1)
        key_valid, key_positions = torch.cat([state.valid, valid], 1), torch.cat([state.positions, positions], 1)
        n = recent.shape[1]
        near, raster = {"valid": key_valid[:, -n:]}, Raster(None, self.width, 0)
        q_row, k_row, v_row, k_inner, v_inner = recent.to(x.dtype).chunk(5, -1)
        own = {"heads": self.heads, "raster": raster}
        h = along(q_row, k_row, v_row, 1, **own, **near, positions=(key_positions[:, -n:], key_positions[:, -n:]))
        fresh = self._finished(state, F.linear(h, *self.read(self.get_submodule("stage_2"), h)))
        column = torch.cat([state.column[:, : -self.width], fresh], 1)
        k_column, v_column = column.to(x.dtype).chunk(2, -1)
        above = along(
            q_column, k_column, v_column, 0, **own, valid=key_valid, positions=(positions, key_positions), when="before"
        )
        inner = along(
            q_inner, k_inner, v_inner, 1, **own, **near, positions=(positions, key_positions[:, -n:]), when="upto"
        )
        if holes:
            index, there, _ = last_valid(key_valid[:, -n:], n)
            recent, key_positions = (
                gather_tokens(recent, index),
                torch.cat([key_positions[:, :-n], gather_tokens(key_positions[:, -n:], index)], 1),
            )
            column, key_valid = (
                torch.cat([column[:, :-n], gather_tokens(column[:, -n:], index)], 1),
                torch.cat([key_valid[:, :-n], there], 1),
            )
        return above + inner, AxialState(recent[:, -self.width :], column, key_valid, key_positions, state.position)

    def _finished(self, state: AxialState, column: Tensor) -> Tensor:
        """Return the column stage's keys and values of the recent tokens.

        Those of the last line are new; those of lines that ended before it are taken from the state.
        """
        width: Any = self.width  # the causal form has a width
        row = torch.div(state.positions[:, -width:], width, rounding_mode="floor")
        kept = torch.where(
            (row == row[:, -1:])[..., None], column[:, :width].to(state.column.dtype), state.column[:, -width:]
        )
        return torch.cat([kept, column[:, width:].to(kept.dtype)], 1)
