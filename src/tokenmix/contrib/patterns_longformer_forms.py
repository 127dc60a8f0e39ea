"""Softmax attention over a window and global tokens: Longformer (Beltagy et al. 2020) and ETC (Ainslie et al. 2020).

As in ``patterns``: by blocks at default positions, a masked dense form with explicit ``positions``, ``attn_mask`` or
S != T.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..errors import MixerError
from ..functional.layout.blocks import (
    ByDistance,
    Ready,
    check,
    dense,
    in_classes,
    merge_heads,
    of_heads,
    own_positions,
    pairs_of,
    prepare_blocks,
    ratio,
)
from ..functional.layout.positions import Positions, in_order
from ..kernels.backend import Backend
from ..kernels.precision import exact
from .parts.global_tokens import to_all, to_first, without_first


@exact
def longformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_global: Tensor,
    k_global: Tensor,
    v_global: Tensor,
    *,
    reach: int,
    dilation: int | list[int],
    global_tokens: int,
    heads: int,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    positions: Positions | None = None,
    added: ByDistance | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend in a sliding window, dilated per head, and to global tokens: those at positions below ``global_tokens``.

    y_t = softmax over { s: |t - s| <= reach d, (t - s) mod d = 0, or s global } of q_t . k_s / sqrt(e), over v_s; a
    global row instead attends all s with q_global, k_global, v_global. With d = 1 it is also ETC: the parts l2l (radius
    ``reach``) and l2g, and g2g and g2l with weights of their own.

    Args:
        dilation: d, one for all heads or one for each.
        positions: (B, T) if they are not the defaults, or a pair, of queries and of keys.
        added: as in ``patterns.strided``; for the global rows too.

    Time and memory O(T (reach + global_tokens) D) at default positions.
    """
    check("longformer", q, k, v, heads, backend, reach=reach + 1, global_tokens=global_tokens + 1)
    dilations = dilation if isinstance(dilation, list) else [dilation] * heads
    if len(dilations) != heads or min(dilations) < 1:
        raise MixerError(
            f"longformer: dilation={dilation!r} must be a positive integer, or one for each of the {heads} heads."
        )
    if 0 in (q.shape[1], k.shape[1]):
        return torch.zeros_like(q)
    if positions is not None or attn_mask is not None or q.shape[1] != k.shape[1]:
        positions = own_positions(q, k, key_mask) if positions is None else positions
        rows, cols, ok = pairs_of(positions, q, k, causal=causal, key_mask=key_mask, attn_mask=attn_mask)
        near = _head_windows(rows, cols, reach, dilations) | (cols < global_tokens)[:, None]
        y = dense(prepare_blocks(q, k, v, heads, key_mask, added), near & ok[:, None], rows - cols)
        own = dense(prepare_blocks(q_global, k_global, v_global, heads, key_mask, added), ok, rows - cols)
        return merge_heads(torch.where((rows < global_tokens)[:, None], own, y), q)

    form = partial(
        _longformer_blocks,
        reach=reach,
        dilations=dilations,
        g=min(global_tokens, q.shape[1]),
        heads=heads,
        causal=causal,
        added=added,
    )
    return in_order(form, (q, k, v, q_global, k_global, v_global), key_mask)


def _longformer_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qg: Tensor,
    kg: Tensor,
    vg: Tensor,
    key_mask: Tensor | None,
    *,
    reach: int,
    dilations: list[int],
    g: int,
    heads: int,
    causal: bool,
    added: ByDistance | None,
) -> Tensor:
    """Compute ``longformer`` where index = position."""
    y = _window_and_shared(prepare_blocks(q, k, v, heads, key_mask, added), reach, dilations, g, causal)
    if g:
        end = g if causal else k.shape[1]  # a causal global row does not see further
        mask = None if key_mask is None else key_mask[:, :end]
        own = prepare_blocks(qg[:, :g], kg[:, :end], vg[:, :end], heads, mask, added)
        y = torch.cat([to_all(own, causal), y[:, :, g:]], 2)
    return merge_heads(y, q)


@exact
def longformer_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_global: Tensor,
    k_global: Tensor,
    v_global: Tensor,
    positions: tuple[Tensor, Tensor],
    *,
    reach: int,
    dilation: int | list[int],
    heads: int,
    key_mask: Tensor,
    global_mask: Tensor,
    added: ByDistance | None = None,
) -> Tensor:
    """Compute the causal form for the last T of S tokens.

    k_global, v_global (B, g, D) belong to positions 0..g-1, and global_mask (B, g) says which of these exist.
    """
    g = k_global.shape[1]
    rows, cols, ok = pairs_of(positions, q, k, causal=True, key_mask=key_mask, attn_mask=None)
    dilations = dilation if isinstance(dilation, list) else [dilation] * heads
    near = _head_windows(rows, cols, reach, dilations) | (cols < g)[:, None]
    y = dense(prepare_blocks(q, k, v, heads, key_mask, added), near & ok[:, None], rows - cols)
    if g:
        at = torch.arange(g, device=q.device)
        own = prepare_blocks(q_global, k_global, v_global, heads, global_mask, added)
        y = torch.where((rows < g)[:, None], dense(own, (at <= rows) & global_mask[:, None], rows - at), y)
    return merge_heads(y, q)


def _head_windows(rows: Tensor, cols: Tensor, reach: int, dilations: list[int]) -> Tensor:
    """Return the windows of the heads, (B, H, T, S)."""
    gap = rows - cols
    windows = {d: (gap.abs() <= reach * d) & (torch.remainder(gap, d) == 0) for d in set(dilations)}
    return torch.stack([windows[d] for d in dilations], 1)


def _window_and_shared(r: Ready, reach: int, dilations: list[int], g: int, causal: bool) -> Tensor:
    """Attend from all rows to their window, without the global tokens, and to the global tokens."""
    index = torch.arange(r.q.shape[-2], device=r.q.device)
    valid = without_first(r, g)
    pieces: dict[int, Tensor] = {}
    for d in sorted(set(dilations)):
        mine = [h for h, other in enumerate(dilations) if other == d]
        part = (r if len(mine) == len(dilations) else of_heads(r, mine))._replace(valid=valid)
        parts = [in_classes(*part, d, back=reach, ahead=0 if causal else reach)]
        part = part._replace(valid=r.valid)
        if g:
            parts.append(to_first(part, g, index, causal))
        pieces |= (
            dict(zip(mine, ratio(*parts).unbind(1), strict=True)) if len(mine) < len(dilations) else {-1: ratio(*parts)}
        )
    return pieces[-1] if -1 in pieces else torch.stack([pieces[h] for h in range(len(dilations))], 1)
