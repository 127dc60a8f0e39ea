"""Axial attention (Ho et al. 2019) as written: one axis of the grid after another; the causal form shifted by a row."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attention


def axial(
    q,
    k,
    v,
    later,
    *,
    heads,
    order,
    combine,
    width=None,
    grid=None,
    prefix=0,
    positions=None,
    starts=None,
    causal_taps=False,
    mask=None,
) -> Tensor:
    """Apply each stage: softmax attention among the tokens of one line.

    k and v of a later stage are maps of the previous stage's result.
    """
    B, T = q.shape[:2]
    positions = (torch.arange(T).expand(B, T) if positions is None else positions) - (
        0 if starts is None else starts[:, None]
    )
    valid = torch.ones(B, T, dtype=torch.bool) if mask is None else mask.diagonal(dim1=1, dim2=2)
    cells = _cells(positions - prefix, grid, width)

    def line(q: Tensor, k: Tensor, v: Tensor, axis: int, when: str = "any") -> Tensor:
        return attention(q, k, v, heads=heads, mask=_meet(cells, positions, prefix, axis, when) & valid[:, None])

    if causal_taps:
        (q_row, q_column, q_inner), (k_row, k_inner), (v_row, v_inner) = q.chunk(3, -1), k.chunk(2, -1), v.chunk(2, -1)
        k_column, v_column = (line(q_row, k_row, v_row, 1) @ later[0].T + later[1]).chunk(2, -1)
        return line(q_column, k_column, v_column, 0, "before") + line(q_inner, k_inner, v_inner, 1, "upto")
    if combine == "sum":
        parts = zip(order, *(a.chunk(len(order), -1) for a in (q, k, v)), strict=True)
        return torch.stack([line(qa, ka, va, axis) for axis, qa, ka, va in parts]).sum(0)
    y = line(q, k, v, order[0])
    for axis, weight, bias in zip(order[1:], later[::2], later[1::2], strict=True):
        q, k, v = (y @ weight.T + bias).chunk(3, -1)
        y = line(q, k, v, axis)
    return y


def _cells(flat: Tensor, grid, width) -> Tensor:
    """Return the cell of each position (B, T, axes)."""
    if grid is None:
        return torch.stack([flat // width, flat % width], -1)
    return torch.stack(torch.unravel_index(flat.clamp_min(0), grid), -1)


def _meet(cells: Tensor, positions: Tensor, prefix: int, axis: int, when: str) -> Tensor:
    """Return which pairs (B, T, T) lie in one line along ``axis``.

    Tokens of the prefix meet all tokens, those before a row's start none.
    """
    here, there = cells[:, :, None], cells[:, None]
    same = torch.ones(*positions.shape, positions.shape[1], dtype=torch.bool)
    for other in range(cells.shape[-1]):
        if other != axis:
            same &= here[..., other] == there[..., other]
    if when != "any":
        same &= there[..., axis] < here[..., axis] if when == "before" else there[..., axis] <= here[..., axis]
    same |= (positions < prefix)[:, :, None] | (positions < prefix)[:, None]
    return same & (positions >= 0)[:, :, None] & (positions >= 0)[:, None]
