"""Local attention of the Image Transformer (Parmar et al. 2018, arXiv 1802.05751), along the raster and in 2-D."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from .layout.lines import Lines, Raster, coordinates, dense, in_lines
from .layout.masks import allowed, zero_masked
from .layout.positions import Positions, back_to_place, turned


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
        return dense(q, k, v, ok & _near(positions, starts, raster, block, memory, T, S, q.device), heads).to(dtype)
    lines = (
        _blocks_1d(T, block[0], memory[0], q.device)
        if len(block) == 1
        else _blocks_2d(T, raster, block, memory, q.device)
    )
    if causal:
        lines = lines._replace(ok=lines.ok & (lines.keys[:, None] <= lines.queries[:, :, None]))
    if starts is None:
        return in_lines(q, k, v, lines, key_mask, heads, prefix).to(dtype)
    valid, q, k, v = turned(starts, key_mask, q, k, v)
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


def _near(
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
