"""Compressive attention (Rae et al. 2020, arXiv 1911.05507): recent tokens as they are, older ones pooled in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from .layout.lines import picked
from .layout.masks import allowed, valid_mask
from .layout.positions import back_to_place, fill_from_last_valid, turned
from .sums.compressed import POOLS, Sizes, Slots, compress, grouped, over_memories, visible, weigh
from .sums.nonfinite import clean, marks


@exact
def compressive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    project: tuple[Tensor, ...],
    relative: Tensor,
    content: Tensor,
    place: Tensor,
    squeeze: tuple[Tensor, ...],
    *,
    heads: int,
    memory: int,
    compressed: int,
    rate: int,
    pool: str = "mean",
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    starts: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend to recent tokens and to the compressed groups before them (Rae et al. 2020, Sec. 3).

    The logits are Transformer-XL's. Positions j c .. j c + c - 1 form group j. Query t attends, token by token, the
    groups from floor((t - n_m + 1) / c) on (at least the last n_m positions), and each of the n_cm groups before those
    as one key and value: W_k f(x_group) + b_k, W_v f(x_group) + b_v, at the group's last position. Nothing is seen
    twice. Without ``causal`` the same holds in the other direction, which is our extension.

    Args:
        q, k, v: (B, T, D), D = heads * e; x: (B, T, D), what k and v were projected from.
        project: W_k, b_k, W_v, b_v. relative, content, place: as in ``transformer_xl``.
        squeeze: weight (D, D, c) and bias (D,) of the convolution for ``pool="conv"``, else empty.
        memory, compressed, rate: n_m, n_cm, c. pool: f over the valid tokens of a group: "mean", "max" or "conv".
        positions: (B, T), increasing; default: indices. starts: (B,), index of position 0; tokens before it give 0.

    Returns:
        (B, T, D) in q's dtype; exactly 0 where there is nothing to attend. Time O(T (n_m + c + n_cm) D heads); with
        ``positions`` O(T^2 D heads).
    """
    sizes = Sizes(memory, compressed, rate, pool)
    _check(q, k, v, x, squeeze, heads, sizes, backend)
    T, dtype = q.shape[1], q.dtype
    if T == 0:
        return torch.zeros_like(q)
    wide, valid = sum_dtype(q), valid_mask(q, key_mask)
    moved = starts is not None and positions is None
    if moved and starts is not None:
        valid, q, k, v, x = turned(starts, valid, q, k, v, x)
    k, v, x = (torch.where(valid[..., None], a, 0.0).to(wide) for a in (k, v, x))
    learned = tuple(a.to(wide) for a in (relative, content, place))
    positions = None if positions is None else fill_from_last_valid(positions, valid)
    groups = grouped(x, valid, rate, positions)
    slots = compress(groups, tuple(a.to(wide) for a in project), tuple(a.to(wide) for a in squeeze), pool)
    if positions is None:
        y = _in_blocks(q.to(wide), k, v, valid, slots, learned, heads, sizes, causal)
    else:
        ok = allowed(q.shape[0], T, T, causal=causal, key_mask=valid, attn_mask=None, device=q.device)
        y = over_memories(q.to(wide), k, v, slots, learned, ok, positions, positions, heads, sizes, causal)
    return (back_to_place(y, starts) if moved and starts is not None else y).to(dtype)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, slots: Slots, learned, heads: int, sizes: Sizes, causal: bool
) -> Tensor:
    """Attend in blocks of queries, for default positions.

    Each block attends the tokens and groups that any of its queries may see.
    """
    T, G, (memory, many, rate, _) = q.shape[1], slots.ids.shape[1], sizes
    tall = -(-memory // rate)  # groups per block
    reach = -(-(memory + rate - 2) // rate)  # neighbouring groups that may be seen token by token
    low = (1 - memory) // rate - many
    high = (tall * rate - memory) // rate if causal else -((1 - tall * rate - memory) // rate) + many
    blocks = torch.arange(0, G, tall, device=q.device)[:, None]
    rows = _window(blocks * rate, 0, tall * rate, T)
    cols = _window(blocks * rate, -reach * rate, (tall + (0 if causal else reach)) * rate, T)
    ids = _window(blocks, low, high, G)
    near, far = visible(rows, cols, ids, sizes, causal)
    near = near & (cols[:, None] <= rows[..., None]) if causal else near
    near = near[None] & picked(valid[..., None], cols)[..., 0][:, :, None]
    far = far[None] & picked(slots.there[..., None], ids)[..., 0][:, :, None]
    own, met = marks(q), torch.cat([picked(marks(slots.keys, slots.values), ids), picked(marks(k, v), cols)], 2)
    keys, values = (
        torch.cat([picked(clean(a), ids), picked(clean(b), cols)], 2) for a, b in ((slots.keys, k), (slots.values, v))
    )
    positions = torch.cat([ids * rate + rate - 1, cols], 1)
    # (B, N, heads, L, e)
    y = weigh(picked(clean(q), rows), keys, values, met, learned, torch.cat([far, near], -1), rows, positions, heads)
    return y.transpose(2, 3).flatten(3).flatten(1, 2)[:, :T] + own


def _window(start: Tensor, low: int, high: int, size: int) -> Tensor:
    """Return start + low .. start + high - 1 as indices (N, high - low).

    Indices outside 0 .. size - 1 become ``size``.
    """
    index = start + torch.arange(low, high, device=start.device)
    return torch.where((index >= 0) & (index < size), index, size)


def _check(q, k, v, x, squeeze, heads, sizes: Sizes, backend) -> None:
    choose("compressive", backend, q)
    if q.ndim != 3 or any(a.shape != q.shape for a in (k, v, x)) or heads < 1 or q.shape[-1] % heads:
        shapes = ", ".join(str(tuple(a.shape)) for a in (q, k, v, x))
        raise MixerError(
            f"compressive: expects q, k, v, x of one shape (B, T, D) with heads={heads} dividing D, got {shapes}."
        )
    if min(sizes[:3]) < 1 or sizes.pool not in POOLS or len(squeeze) != (2 if sizes.pool == "conv" else 0):
        pools = ", ".join(POOLS)
        raise MixerError(
            f"compressive: expects memory, compressed, rate >= 1, pool in {pools}, squeeze for conv only; got {sizes}."
        )
