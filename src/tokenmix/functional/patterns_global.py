"""Softmax attention over patterns with global tokens.

Longformer (Beltagy et al. 2020), ETC (Ainslie et al. 2020) and BigBird (Zaheer et al. 2020). As in ``patterns``: by
blocks at default positions, a masked dense form with explicit ``positions``, ``attn_mask`` or S != T.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend
from ..kernels.precision import exact
from .layout.blocks import (
    ByDistance,
    Part,
    Ready,
    added_between,
    blockwise,
    check,
    cut,
    dense,
    in_classes,
    joined,
    of_heads,
    own_positions,
    pairs_of,
    part_of,
    ratio,
    ready,
)
from .layout.positions import Positions, in_order

BITS = (1 << 31) - 1


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
        near = _dilated(rows, cols, reach, dilations) | (cols < global_tokens)[:, None]
        y = dense(ready(q, k, v, heads, key_mask, added), near & ok[:, None], rows - cols)
        own = dense(ready(q_global, k_global, v_global, heads, key_mask, added), ok, rows - cols)
        return joined(torch.where((rows < global_tokens)[:, None], own, y), q)

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
    y = _window_and_shared(ready(q, k, v, heads, key_mask, added), reach, dilations, g, causal)
    if g:
        end = g if causal else k.shape[1]  # a causal global row does not see further
        mask = None if key_mask is None else key_mask[:, :end]
        own = ready(qg[:, :g], kg[:, :end], vg[:, :end], heads, mask, added)
        y = torch.cat([_everything(own, causal), y[:, :, g:]], 2)
    return joined(y, q)


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
    near = _dilated(rows, cols, reach, dilations) | (cols < g)[:, None]
    y = dense(ready(q, k, v, heads, key_mask, added), near & ok[:, None], rows - cols)
    if g:
        at = torch.arange(g, device=q.device)
        own = ready(q_global, k_global, v_global, heads, global_mask, added)
        y = torch.where((rows < g)[:, None], dense(own, (at <= rows) & global_mask[:, None], rows - at), y)
    return joined(y, q)


def _dilated(rows: Tensor, cols: Tensor, reach: int, dilations: list[int]) -> Tensor:
    """Return the windows of the heads, (B, H, T, S)."""
    gap = rows - cols
    windows = {d: (gap.abs() <= reach * d) & (torch.remainder(gap, d) == 0) for d in set(dilations)}
    return torch.stack([windows[d] for d in dilations], 1)


def _window_and_shared(r: Ready, reach: int, dilations: list[int], g: int, causal: bool) -> Tensor:
    """Attend from all rows to their window, without the global tokens, and to the global tokens."""
    index = torch.arange(r.q.shape[-2], device=r.q.device)
    valid = _without(r, g)
    pieces: dict[int, Tensor] = {}
    for d in sorted(set(dilations)):
        mine = [h for h, other in enumerate(dilations) if other == d]
        part = (r if len(mine) == len(dilations) else of_heads(r, mine))._replace(valid=valid)
        parts = [in_classes(*part, d, back=reach, ahead=0 if causal else reach)]
        part = part._replace(valid=r.valid)
        if g:
            parts.append(_shared(part, g, index, causal))
        pieces |= (
            dict(zip(mine, ratio(*parts).unbind(1), strict=True)) if len(mine) < len(dilations) else {-1: ratio(*parts)}
        )
    return pieces[-1] if -1 in pieces else torch.stack([pieces[h] for h in range(len(dilations))], 1)


def _without(r: Ready, g: int) -> Tensor | None:
    """Return which keys are valid and not among the first g."""
    if g == 0:
        return r.valid
    later = (torch.arange(r.k.shape[-2], device=r.k.device) >= g)[None, None]
    return later if r.valid is None else r.valid & later


def _shared(r: Ready, g: int, index: Tensor, causal: bool) -> Part:
    """Attend from every row to the first g keys."""
    ok = (index[:g] <= index[:, None]) if causal else (index[:g] >= 0)[None]
    k, v = (a[:, :, :g].contiguous() for a in (r.k, r.v))  # views would keep all keys for backward
    added = added_between(r.added, index[:, None] - index[:g], len(index))
    return part_of(r.q, k, v, ok if r.valid is None else ok & r.valid[:, :, None, :g], added)


def _everything(r: Ready, causal: bool) -> Tensor:
    """Attend from the first rows to all given keys."""
    rows, cols = (torch.arange(a.shape[-2], device=a.device) for a in (r.q, r.k))
    ok = cols <= rows[:, None] if causal else (cols >= 0)[None]
    added = added_between(r.added, rows[:, None] - cols, max(len(rows), len(cols)))
    return ratio(part_of(r.q, r.k, r.v, ok if r.valid is None else ok & r.valid[:, :, None], added))


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
        positions: as in ``patterns.local``; blocks start at each row's position 0, and the row ends with its last valid
            key.
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
        return joined(dense(ready(q, k, v, heads, key_mask, added), pattern & ok[:, None], rows - cols), q)

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
    r, T = ready(q, k, v, draw["heads"], key_mask, added), q.shape[1]
    index, g = torch.arange(T, device=q.device), min(draw["first"] * block, T)
    window = r._replace(valid=_without(r, g))
    parts = [blockwise(*window, block, side, 0 if causal else side, _before if causal else _all)]
    if g:
        parts.append(_shared(r, g, index, causal))
    if draw["count"]:
        i = torch.arange(-(-T // block), device=q.device)[None]
        end = i + 1 if causal else _blocks_of(_length(index[None], key_mask), block)
        parts.append(_random_part(r, random_choice(i, end, **draw), block))
    y = ratio(*parts)
    if g and not causal:
        y = torch.cat([_everything(r._replace(q=r.q[:, :, :g]), False), y[:, :, g:]], 2)
    return joined(y, q)


def _before(rows: Tensor, cols: Tensor) -> Tensor:
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
    number = _hashed(i[:, None, :, None] * 7919 + head * 104729 + slot * 1299709 + (seed & BITS) * 15485863)
    pick = start + ((number * (stop - start)) >> 31)
    chosen = first + pick
    chosen = torch.where(chosen >= low[:, None, :, None], chosen + inside[:, None, :, None], chosen)
    return torch.where(stop > start, chosen, -1)


def _hashed(x: Tensor) -> Tensor:
    """Hash to numbers below 2^31; the constants keep all products below 2^62."""
    x = x & BITS
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        x = ((x ^ (x >> shift)) * factor) & BITS
    return x ^ (x >> 15)


def _random_part(r: Ready, chosen: Tensor, block: int) -> Part:
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
    return Part(*(a.flatten(-3, -2)[..., :T, :] for a in part_of(cut(r.q, n, block), k, v, ok, added)))
