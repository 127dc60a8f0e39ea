"""Parts of compressive attention: grouping, compression, visibility, and the reconstruction loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.precision import exact
from ..layout.lines import dense, mixed, per_head
from ..transformer_xl import by_position
from .nonfinite import clean, marks

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


def grouped(x: Tensor, valid: Tensor, rate: int, positions: Tensor | None) -> Groups:
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
    return mixed(
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
