"""Axial attention (Ho et al. 2019, arXiv 1912.12180): one axis of a grid after another; causal in raster order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.masks import zero_masked
from ..functional.layout.positions import Positions, align_to_start, back_to_place, gather_tokens, last_valid
from ..kernels.backend import Backend, choose
from ..kernels.precision import cast_alike, exact, sum_dtype
from ..mixers.base import About, Arguments, Facts, Inputs, Mixer, chunk_positions, register_state
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least, check_heads, one_of
from ..mixers.parts.shared import check_positions, has_holes, in_pieces, largest_dot, row_starts, valid_mask
from ..mixers.parts.weights_on_call import ReadLinear, child_weights
from .parts.lines import Lines, Raster, coordinates, dense, in_lines, map_tokens


@exact
def axial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    later: tuple[Tensor, ...],
    *,
    heads: int,
    order: tuple[int, ...],
    combine: str = "sequence",
    width: int | None = None,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    starts: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend from each token to the tokens of its line, for each axis of ``order`` in turn (Ho et al. 2019, Sec. 3).

    ``combine="sequence"``: h_1 = A_1(q, k, v), h_n = A_n of (W_n h_{n-1} + b_n) cut into queries, keys and values; the
        last h is the result.
    ``combine="sum"``: q, k and v hold one part per axis, and y = sum_n A_n(q_n, k_n, v_n).
    ``causal``, in raster order with ``width`` tokens to a line: q = (row, column, inner), k = v = (row, inner); h =
        A_row, over whole lines; y = A_column(q_column; W h + b), over the lines above only, + A_inner, along the line
        up to the token. No line is read before it has ended, so this is causal, and every earlier token reaches every
        later one.

    Args:
        q, k, v: (B, T, D), D = heads * e; times the number of parts.
        later: (W_2, b_2, W_3, b_3, ...): (3 D, D) and (3 D,); (2 D, D) and (2 D,) when causal; empty for a sum.
        width: tokens per line, for a sequence in raster order; or grid: sizes of the grid of the tokens after the first
            ``prefix``. Prefix tokens attend all tokens and are attended by all.
        positions: (B, T) if they are not the indices; increasing in the causal form.
        starts: (B,), the index of position 0 in each row; tokens before it give 0.

    Returns:
        (B, T, D) in q's dtype; exactly 0 where there is nothing to attend. Time O(T (H + W) D); with ``positions``
        O(T^2 D).
    """
    _check(q, k, v, later, order, combine, width, grid, causal, backend)
    if q.shape[1] == 0:
        return q[..., : q.shape[-1] // (3 if causal else len(order) if combine == "sum" else 1)]
    dtype, raster = q.dtype, Raster(grid, width, prefix)
    wide = sum_dtype(q)
    q, k, v, *later_ = (a.to(wide) for a in (q, k, v, *later))
    valid = key_mask
    if starts is not None and positions is None:
        valid, q, k, v = align_to_start(starts, key_mask, q, k, v)
    stages = _causal if causal else _sum_lines if combine == "sum" else _in_turn
    y = stages(q, k, v, later_, order, {"heads": heads, "raster": raster, "valid": valid, "positions": positions})
    return (y if starts is None or positions is not None else back_to_place(y, starts)).to(dtype)


@exact
def attend_lines(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: int,
    *,
    heads: int,
    raster: Raster,
    valid: Tensor | None = None,
    positions: Positions | None = None,
    when: str = "any",
) -> Tensor:
    """Attend inside each line along ``axis``.

    ``when`` is "any" for all tokens of the line, "upto" for those up to the query, or "before" for those before it.
    """
    q, k, v = cast_alike(q, k, v)
    k, v = zero_masked(k, valid), zero_masked(v, valid)
    if positions is None:
        return in_lines(q, k, v, _lines(q.shape[1], axis, when, raster, q.device), valid, heads, raster.prefix)
    rows, cols = raster.positions(positions, None, q.shape[1], k.shape[1], q.device)
    here, there = coordinates(rows, raster)[:, :, None], coordinates(cols, raster)[:, None]
    ok = torch.ones(1, 1, 1, dtype=torch.bool, device=q.device)
    for other in range(here.shape[-1]):
        if other != axis:
            ok = ok & (here[..., other] == there[..., other])
    if when != "any":
        ok = ok & (there[..., axis] < here[..., axis] + (when == "upto"))
    ok = raster.with_prefix(ok, rows, cols)
    return dense(q, k, v, ok if valid is None else ok & valid[:, None], heads)


def _lines(T: int, axis: int, when: str, raster: Raster, device: torch.device) -> Lines:
    """Return the lines of the grid along one axis, (N, n)."""
    table = raster.cells(T, device).movedim(axis, -1).flatten(0, -2)
    n = table.shape[1]
    ok = torch.ones(1, n, n, dtype=torch.bool, device=device)
    return Lines(table, table, ok if when == "any" else ok.tril(0 if when == "upto" else -1))


def _in_turn(q: Tensor, k: Tensor, v: Tensor, later: list[Tensor], order: tuple[int, ...], given: dict) -> Tensor:
    y = attend_lines(q, k, v, order[0], **given)
    for axis, weight, bias in zip(order[1:], later[::2], later[1::2], strict=True):
        q, k, v = map_tokens(y, weight, bias).chunk(3, -1)
        y = attend_lines(q, k, v, axis, **given)
    return y


def _sum_lines(q: Tensor, k: Tensor, v: Tensor, later: list[Tensor], order: tuple[int, ...], given: dict) -> Tensor:
    parts = zip(order, *(a.chunk(len(order), -1) for a in (q, k, v)), strict=True)
    return torch.stack([attend_lines(qa, ka, va, axis, **given) for axis, qa, ka, va in parts]).sum(0)


def _causal(q: Tensor, k: Tensor, v: Tensor, later: list[Tensor], order: tuple[int, ...], given: dict) -> Tensor:
    (q_row, q_column, q_inner), (k_row, k_inner), (v_row, v_inner) = q.chunk(3, -1), k.chunk(2, -1), v.chunk(2, -1)
    k_column, v_column = map_tokens(attend_lines(q_row, k_row, v_row, 1, **given), later[0], later[1]).chunk(2, -1)
    return attend_lines(q_column, k_column, v_column, 0, when="before", **given) + attend_lines(
        q_inner, k_inner, v_inner, 1, when="upto", **given
    )


def _check(q, k, v, later, order, combine, width, grid, causal, backend) -> None:
    choose("axial", backend, q)
    if combine not in ("sequence", "sum"):
        raise MixerError(f"axial: combine={combine!r}; choose 'sequence' or 'sum'.")
    if (width is None) == (grid is None):
        raise MixerError(f"axial: expects either a grid or the width of its lines, got width={width}, grid={grid}.")
    axes = 2 if grid is None else len(grid)
    if sorted(order) != list(range(axes)):
        raise MixerError(f"axial: order must name each of the {axes} axes once, got {order}.")
    if causal and (grid is not None or combine == "sum"):
        given = f"grid={grid}, combine={combine!r}"
        raise MixerError(f"axial: causal=True needs raster order with a width and combine='sequence', got {given}.")
    expected = 2 if causal else 0 if combine == "sum" else 2 * (axes - 1)
    if q.ndim != 3 or k.shape != v.shape or k.shape[:2] != q.shape[:2] or len(later) != expected:
        shapes = ", ".join(str(tuple(a.shape)) for a in (q, k, v))
        raise MixerError(
            f"axial: expects q, k, v (B, T, .) and {expected} tensors in later, got {shapes} and {len(later)}."
        )


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

    facts = Facts(
        causal=True,
        streaming=True,
        grid=True,
        about=About("Ho et al. 2019, arXiv 1912.12180", "fixed pattern", "T (H + W) D", "T (D + heads (H + W))"),
        form=axial,
        carries=("out_proj",),
    )

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

    def narrow_capabilities(self, can):
        """Return the features of this instance; it takes a grid if no width was given."""
        return replace(can, grid=self.width is None)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``axial`` for this input: (positional, keyword)."""
        x, positions, key_mask, grid = inputs.x, inputs.positions, inputs.key_mask, inputs.grid
        check_positions(self, positions, key_mask, rising=self.causal)
        if grid is not None and self.width is not None:
            self.refuse(
                f"was built with width={self.width} and mixes a sequence in raster order, got grid={tuple(grid)}"
            )
        if self.width is None and (grid is None or len(grid) != self.ndim):
            self.refuse(
                f"was built without width and needs grid=, the {self.ndim} sizes of the token grid, got grid={grid}"
            )
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x), self._later_weights(x)
        place = {"width": self.width, "grid": grid, "prefix": inputs.prefix, "positions": positions}
        starts = None if self.width is None else row_starts(key_mask, positions)
        pattern = {"heads": self.heads, "order": self.order, "combine": self.combine}
        return args, {**pattern, **place, "starts": starts, "causal": self.causal, "key_mask": key_mask}

    def _later_weights(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the weights and biases of the stages after the first."""
        maps = [child_weights(self, self.get_submodule(f"stage_{n + 2}"), x) for n in range(self.stages)]
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
        h = attend_lines(
            q_row, k_row, v_row, 1, **own, **near, positions=(key_positions[:, -n:], key_positions[:, -n:])
        )
        fresh = self._column_keys(state, F.linear(h, *child_weights(self, self.get_submodule("stage_2"), h)))
        column = torch.cat([state.column[:, : -self.width], fresh], 1)
        k_column, v_column = column.to(x.dtype).chunk(2, -1)
        above = attend_lines(
            q_column, k_column, v_column, 0, **own, valid=key_valid, positions=(positions, key_positions), when="before"
        )
        inner = attend_lines(
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

    def _column_keys(self, state: AxialState, column: Tensor) -> Tensor:
        """Return the column stage's keys and values of the recent tokens.

        Those of the last line are new; those of lines that ended before it are taken from the state.
        """
        width: Any = self.width  # the causal form has a width
        row = torch.div(state.positions[:, -width:], width, rounding_mode="floor")
        kept = torch.where(
            (row == row[:, -1:])[..., None], column[:, :width].to(state.column.dtype), state.column[:, -width:]
        )
        return torch.cat([kept, column[:, width:].to(kept.dtype)], 1)
