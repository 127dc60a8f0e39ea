"""Axial attention (Ho et al. 2019, arXiv 1912.12180): one axis of a grid after another; causal in raster order."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import alike, exact, sum_dtype
from .layout.lines import Lines, Raster, coordinates, dense, in_lines, mapped
from .layout.masks import zero_masked
from .layout.positions import Positions, back_to_place, turned


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
        valid, q, k, v = turned(starts, key_mask, q, k, v)
    stages = _causal if causal else _summed if combine == "sum" else _in_turn
    y = stages(q, k, v, later_, order, {"heads": heads, "raster": raster, "valid": valid, "positions": positions})
    return (y if starts is None or positions is not None else back_to_place(y, starts)).to(dtype)


@exact
def along(
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
    q, k, v = alike(q, k, v)
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
    y = along(q, k, v, order[0], **given)
    for axis, weight, bias in zip(order[1:], later[::2], later[1::2], strict=True):
        q, k, v = mapped(y, weight, bias).chunk(3, -1)
        y = along(q, k, v, axis, **given)
    return y


def _summed(q: Tensor, k: Tensor, v: Tensor, later: list[Tensor], order: tuple[int, ...], given: dict) -> Tensor:
    parts = zip(order, *(a.chunk(len(order), -1) for a in (q, k, v)), strict=True)
    return torch.stack([along(qa, ka, va, axis, **given) for axis, qa, ka, va in parts]).sum(0)


def _causal(q: Tensor, k: Tensor, v: Tensor, later: list[Tensor], order: tuple[int, ...], given: dict) -> Tensor:
    (q_row, q_column, q_inner), (k_row, k_inner), (v_row, v_inner) = q.chunk(3, -1), k.chunk(2, -1), v.chunk(2, -1)
    k_column, v_column = mapped(along(q_row, k_row, v_row, 1, **given), later[0], later[1]).chunk(2, -1)
    return along(q_column, k_column, v_column, 0, when="before", **given) + along(
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
