"""Compressive attention (Rae et al. 2020, arXiv 1911.05507) as functions.

Recent tokens are attended as they are, older ones pooled in groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..functional.layout.masks import allowed, valid_mask
from ..functional.layout.positions import align_to_start, back_to_place, fill_from_last_valid
from ..functional.sums.nonfinite import clean, marks
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from .parts.lines import attend_lines, dense, gather_lines, per_head
from .parts.relative import by_position


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
        valid, q, k, v, x = align_to_start(starts, valid, q, k, v, x)
    k, v, x = (torch.where(valid[..., None], a, 0.0).to(wide) for a in (k, v, x))
    learned = tuple(a.to(wide) for a in (relative, content, place))
    positions = None if positions is None else fill_from_last_valid(positions, valid)
    groups = group_tokens(x, valid, rate, positions)
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
    near = near[None] & gather_lines(valid[..., None], cols)[..., 0][:, :, None]
    far = far[None] & gather_lines(slots.there[..., None], ids)[..., 0][:, :, None]
    own, met = (
        marks(q),
        torch.cat([gather_lines(marks(slots.keys, slots.values), ids), gather_lines(marks(k, v), cols)], 2),
    )
    keys, values = (
        torch.cat([gather_lines(clean(a), ids), gather_lines(clean(b), cols)], 2)
        for a, b in ((slots.keys, k), (slots.values, v))
    )
    positions = torch.cat([ids * rate + rate - 1, cols], 1)
    # (B, N, heads, L, e)
    y = weigh(
        gather_lines(clean(q), rows), keys, values, met, learned, torch.cat([far, near], -1), rows, positions, heads
    )
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


POOLS = ("mean", "max", "conv")


class Sizes(NamedTuple):
    """Hold the structure: n_m, n_cm, c and the compression function."""

    memory: int
    compressed: int
    rate: int
    pool: str


class Groups(NamedTuple):
    """Hold groups of ``rate`` tokens by position.

    The tokens (B, G, rate, D), which of them are valid (B, G, rate), and the number of each group (B, G).
    """

    tokens: Tensor
    valid: Tensor
    ids: Tensor


class Slots(NamedTuple):
    """Hold compressed memory.

    Keys and values (B, G, D), group numbers (B, G), and whether a slot holds anything (B, G).
    """

    keys: Tensor
    values: Tensor
    ids: Tensor
    there: Tensor


def group_tokens(x: Tensor, valid: Tensor, rate: int, positions: Tensor | None) -> Groups:
    """Arrange the tokens in groups.

    With explicit positions there is room for as many groups as tokens; groups are counted in the order of the tokens.
    """
    B, T, D = x.shape
    if positions is None:
        ids = torch.arange(-(-T // rate), device=x.device).expand(B, -1)
        more = -T % rate
        return Groups(
            F.pad(x, (0, 0, 0, more)).unflatten(1, (-1, rate)), F.pad(valid, (0, more)).unflatten(1, (-1, rate)), ids
        )
    group = torch.div(positions, rate, rounding_mode="floor")
    rank = F.pad((group[:, 1:] != group[:, :-1]).long(), (1, 0)).cumsum(1)
    spot = torch.where(
        valid, rank * rate + positions - group * rate, T * rate
    )  # masked tokens go to the extra slot that is dropped
    tokens = (
        x.new_zeros(B, T * rate + 1, D).scatter(1, spot[..., None].expand(-1, -1, D), x)[:, :-1].unflatten(1, (T, rate))
    )
    there = (
        torch.zeros(B, T * rate + 1, dtype=torch.bool, device=x.device)
        .scatter(1, spot, valid)[:, :-1]
        .unflatten(1, (T, rate))
    )
    return Groups(tokens, there, torch.full_like(group, -1).scatter(1, rank, group))


@exact
def compress(groups: Groups, project: tuple[Tensor, ...], squeeze: tuple[Tensor, ...], pool: str) -> Slots:
    """Apply f to the tokens of each group and return the key and the value of the result."""
    tokens, valid, met = clean(groups.tokens), groups.valid[..., None], marks(groups.tokens).sum(2)
    there = groups.valid.any(-1)
    if pool == "conv":
        pooled = torch.einsum("bgrd,edr->bge", tokens, squeeze[0]) + squeeze[1]
    elif pool == "max":
        pooled = torch.where(
            there[..., None], tokens.masked_fill(~valid & there[..., None, None], float("-inf")).amax(2), 0.0
        )
    else:
        pooled = tokens.sum(2) / valid.sum(2).clamp_min(1)
    pooled = torch.where(there[..., None], pooled, 0.0)
    return Slots(pooled @ project[0].T + project[1] + met, pooled @ project[2].T + project[3] + met, groups.ids, there)


def visible(rows: Tensor, cols: Tensor, ids: Tensor, sizes: Sizes, causal: bool) -> tuple[Tensor, Tensor]:
    """Return which keys the queries at ``rows`` see: (..., T, S) and (..., T, G).

    The first mask marks the tokens at ``cols`` that are seen individually, the second the groups ``ids`` seen
    compressed.
    """
    _, many, rate, _ = sizes
    group = torch.div(cols, rate, rounding_mode="floor")[..., None, :]
    first = torch.div(rows - sizes.memory + 1, rate, rounding_mode="floor")[..., None]
    end = -torch.div(-rows - sizes.memory, rate, rounding_mode="floor")[..., None]
    ids = ids[..., None, :]
    far = (ids >= first - many) & (ids < first)
    if not causal:
        far = far | ((ids >= end) & (ids < end + many))
    return (group >= first) & (group < end), far


@exact
def over_memories(
    q, k, v, slots: Slots, learned, ok: Tensor, rows: Tensor, cols: Tensor, heads: int, sizes: Sizes, causal: bool
) -> Tensor:
    """Attend from q (B, T, D) at ``rows`` over tokens at ``cols`` (B, S) where ``ok`` (B, T, S), and over the slots."""
    near, far = visible(rows, cols, slots.ids, sizes, causal)
    both = torch.cat([far & slots.there[:, None], near & ok], 2)
    positions = torch.cat([slots.ids * sizes.rate + sizes.rate - 1, cols], 1)
    keys, values = torch.cat([slots.keys, k], 1), torch.cat([slots.values, v], 1)
    y = weigh(clean(q), clean(keys), clean(values), marks(keys, values), learned, both, rows, positions, heads)
    return y.transpose(1, 2).flatten(2) + marks(q)


@exact
def weigh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    met: Tensor,
    learned: tuple[Tensor, ...],
    ok: Tensor,
    rows: Tensor,
    cols: Tensor,
    heads: int,
) -> Tensor:
    """Compute the heads of attention with relative positions.

    q (..., L, D), k and v (..., W, D), all finite, and the marks of the keys (..., W, 1) give (..., heads, L, e).
    """
    relative, content, place = learned
    scale = (q.shape[-1] // heads) ** -0.5
    asked, located, kh, vh = (per_head(a, heads) for a in ((q + content) * scale, (q + place) * scale, k, v))
    return attend_lines(
        asked @ kh.transpose(-1, -2) + by_position(located, rows, cols, relative),
        ok.unsqueeze(-3),
        vh,
        met.unsqueeze(-3),
    )


@exact
def reconstruction_loss(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Slots,
    valid: Tensor,
    positions: Tensor,
    heads: int,
    sizes: Sizes,
    causal: bool,
) -> Tensor:
    """Compute the attention reconstruction loss (Rae et al. 2020, Algorithm 2).

    It compares what content attention reads from the compressed groups a query sees with what it reads from their
    tokens, as the mean over queries and features of the squared difference. q, k and v should be detached, so that only
    f learns from it. O(T^2 D).
    """
    _, far = visible(positions, positions, slots.ids, sizes, causal)
    group = torch.div(positions, sizes.rate, rounding_mode="floor")
    _, old = visible(positions, positions, group, sizes, causal)
    had, got = (
        dense(q, k, v, old & valid[:, None], heads),
        dense(q, slots.keys, slots.values, far & slots.there[:, None], heads),
    )
    return (had - got).square().mean()
