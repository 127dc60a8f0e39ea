"""Sparse Sinkhorn attention (Tay et al. 2020) as functions.

Each block attends itself and the block that a learned soft permutation brings to it. Tokens are laid out as (block,
offset in it); absent and masked ones leave holes, which weigh nothing. Blocks without a valid token do not exist.
Everything about the permutation, which is small, is float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..functional.layout.heads import by_head
from ..functional.layout.masks import valid_mask
from ..functional.sums.nonfinite import guard_nonfinite, propagate_nonfinite
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from .parts.buckets import LOWEST, ratio, sums_of


class Layout(NamedTuple):
    """Hold the block number of each token (B, T), its slot, and which slots hold a valid token (B, N, size).

    slot = block * size + offset (B, T), with the masked tokens at the end.
    """

    number: Tensor
    slot: Tensor
    there: Tensor

    def arrange(self, a: Tensor) -> Tensor:
        """Arrange (B, H, T, e) as (B, H, N, size, e), 0 in holes."""
        N, size = self.there.shape[1:]
        at = self.slot[:, None, :, None].expand(-1, *a.shape[1:2], -1, a.shape[-1])
        return a.new_zeros(*a.shape[:2], N * size + 1, a.shape[-1]).scatter(2, at, a)[:, :, :-1].unflatten(2, (N, size))

    def take(self, a: Tensor) -> Tensor:
        """Undo ``arrange``, with 0 for masked tokens."""
        flat = F.pad(a.flatten(2, 3), (0, 0, 0, 1))
        return flat.gather(2, self.slot[:, None, :, None].expand(-1, *a.shape[1:2], -1, a.shape[-1]))


def lay_out(positions: Tensor, valid: Tensor, *, block: int, count: int) -> Layout:
    """Lay out the tokens in blocks; positions and valid (B, T).

    A block is position // ``block``; blocks are numbered without gaps over those that hold a valid token.
    """
    key = torch.div(positions, block, rounding_mode="floor")
    ordered, token = torch.where(valid, key, torch.iinfo(torch.int64).max).sort(1)
    new = F.pad((ordered[:, 1:] != ordered[:, :-1]).long(), (min(1, key.shape[1]), 0))
    number = torch.zeros_like(token).scatter(1, token, new.cumsum(1))
    slot = torch.where(valid, number * block + positions - key * block, count * block)
    there = torch.zeros(valid.shape[0], count * block + 1, dtype=torch.bool, device=valid.device).scatter(
        1, slot, valid
    )
    return Layout(number, slot, there[:, :-1].unflatten(1, (count, block)))


@exact
@guard_nonfinite("q", "k", "v")
def sinkhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sorting: Tensor,
    *,
    heads: int,
    block: int,
    iterations: int,
    temperature: float,
    sortcut: int | None = None,
    gumbel: bool = False,
    positions: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s softmax_s(q_t . k_s / sqrt(e)) v_s over t's own block i and its sorted block.

    The sorted block holds the b keys and values sum_j P_ij (K_j, V_j). P = exp of ``iterations`` times (rows, then
    columns) of R normalised in logs; R_ij = mean of Q_i^T A mean of K_j / (sqrt(e) temperature), A = ``sorting``.
    ``causal``: j < i only; the mean of Q_i is that of all blocks before i; and columns are normalised by their rows up
    to
        i, so that row i depends on blocks before it alone.
    ``sortcut`` = n: every query attends the first n sorted blocks and nothing else (not causal).

    Args:
        q, k, v: (B, T, D). sorting: (heads, e, e). gumbel: add Gumbel noise to R, for training.
        positions: (B, T), increasing; they determine the blocks. Default: index minus index of the row's first True.

    Masked queries, and those with nothing to attend, give 0.
    """
    choose("sinkhorn", backend, q)
    if q.shape[-1] % heads or sorting.shape != (heads, q.shape[-1] // heads, q.shape[-1] // heads):
        raise MixerError(f"sinkhorn: heads={heads} and sorting {tuple(sorting.shape)} do not fit q {tuple(q.shape)}.")
    if causal and sortcut is not None:
        raise MixerError(f"sinkhorn: sortcut={sortcut} has no causal form, since every query sees the whole sequence.")
    valid, T = valid_mask(q, key_mask), q.shape[1]
    if positions is None:
        index = torch.arange(T, device=q.device).expand(q.shape[:2])
        positions, count = (index - (valid.cumsum(1) == 0).sum(1, keepdim=True)).clamp_min(0), -(-T // block)
    else:
        count = T
    layout = lay_out(positions.long(), valid, block=block, count=count)
    qs, ks, vs = (layout.arrange(a) for a in prepare_heads(q, k, v, valid, heads))
    P, some = permutation(
        qs, ks, sorting, layout.there, iterations=iterations, temperature=temperature, gumbel=gumbel, causal=causal
    )
    keys, values = (torch.einsum("bhij,bhjue->bhiue", P.to(a.dtype), a).to(a.dtype) for a in (ks, vs))
    # (B, N, size): the slots of the sorted block that some valid token fills
    held = (some.to(torch.float32) @ layout.there.to(torch.float32)) > 0
    queries = qs * qs.shape[-1] ** -0.5
    if sortcut is None:
        y = _own_and_sorted(queries, (ks, vs, layout.there), (keys, values, held), causal=causal)
    else:
        keys, values = (a[:, :, :sortcut].flatten(2, 3) for a in (keys, values))
        y = ratio(sums_of(queries.flatten(2, 3), keys, values, held[:, None, None, :sortcut].flatten(3))).unflatten(
            2, (count, block)
        )
    return layout.take(y).transpose(1, 2).flatten(2).to(v.dtype)


def prepare_heads(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, heads: int) -> list[Tensor]:
    """Return the tensors per head, in float32 or better, with zeros at masked tokens."""
    wide = sum_dtype(q)
    return [by_head(torch.where(valid[..., None], a.to(wide), 0.0), heads) for a in (q, k, v)]


def permutation(
    q: Tensor,
    k: Tensor,
    sorting: Tensor,
    there: Tensor,
    *,
    iterations: int,
    temperature: float,
    gumbel: bool,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Compute P (B, H, N, N) from queries and keys in slots (B, H, N, size, e).

    Also returns which blocks may be sorted where (B, N, N). Row i: what is brought to block i.
    """
    filled = there.sum(-1)[:, None, :, None].double()
    sums, counts = q.double().sum(-2), filled
    if causal:
        sums, counts = sums.cumsum(2) - sums, filled.cumsum(2) - filled
    asks, gives = sums / counts.clamp_min(1.0), k.double().sum(-2) / filled.clamp_min(1.0)
    R = (asks @ sorting.double()) @ gives.transpose(-1, -2) * q.shape[-1] ** -0.5
    if gumbel:
        R = R - torch.log(-torch.log(torch.rand_like(R).clamp(1e-20, 1 - 1e-12)))
    here = there.any(-1)
    some = here[:, :, None] & here[:, None, :]
    some = some & torch.ones(some.shape[1:], dtype=torch.bool, device=q.device).tril(-1) if causal else some
    ok, X = some[:, None], R / temperature
    for _ in range(iterations):
        for dim in (-1, -2):
            X = torch.where(ok, X, LOWEST)
            X = X - (_log_prefix_sums(X) if causal and dim == -2 else _log_sum(X, dim))
    return torch.where(ok, torch.exp(torch.where(ok, X, 0.0)), 0.0), some


def _log_sum(X: Tensor, dim: int) -> Tensor:
    """Compute log sum exp, finite even where everything is LOWEST."""
    m = X.detach().amax(dim, keepdim=True) if X.numel() else X.sum(dim, keepdim=True)
    return m + torch.log(torch.exp(X - m).sum(dim, keepdim=True).clamp_min(1e-300))


def _log_prefix_sums(X: Tensor) -> Tensor:
    """Compute the log of the sum of exp over rows 0..i, for each row i.

    Rows at distance 1, 2, 4, ... are paired, each pair under its own maximum, so no row sees a later one.
    """
    step = 1
    while step < X.shape[-2]:
        before = F.pad(X[..., :-step, :], (0, 0, step, 0), value=LOWEST)
        m = torch.maximum(X, before).detach()
        X = m + torch.log(torch.exp(X - m) + torch.exp(before - m))
        step *= 2
    return X


def _own_and_sorted(
    q: Tensor, own: tuple[Tensor, Tensor, Tensor], brought: tuple[Tensor, Tensor, Tensor], *, causal: bool
) -> Tensor:
    """Attend from each block's queries (B, H, N, b, e) to its own keys and values and those brought to it.

    Each is given with the slots that count (B, N, b).
    """
    size = q.shape[3]
    k, v = (torch.cat(pair, 3) for pair in zip(own[:2], brought[:2], strict=True))
    near = torch.ones(size, size, dtype=torch.bool, device=q.device)
    near = own[2][..., None, :] & (near.tril() if causal else near)
    ok = torch.cat([near, brought[2][..., None, :].expand_as(near)], -1)
    return ratio(sums_of(q, k, v, ok[:, None]))


@exact
def sinkhorn_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sorting: Tensor,
    valid: Tensor,
    positions: Tensor,
    *,
    last: int,
    count: int,
    heads: int,
    block: int,
    iterations: int,
    temperature: float,
) -> Tensor:
    """Compute the causal form for the ``last`` tokens of a history (B, S, D) of at most ``count`` blocks.

    positions (B, S). Sorted blocks are mixed for these tokens only.
    """
    sizes = {
        "last": last,
        "count": count,
        "heads": heads,
        "block": block,
        "iterations": iterations,
        "temperature": temperature,
    }
    return propagate_nonfinite(
        partial(_chunk, sorting, valid, positions, sizes), None, q, k, v, causal=True, key_mask=valid
    )


def _chunk(
    sorting: Tensor, valid: Tensor, positions: Tensor, sizes: dict[str, Any], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Compute ``sinkhorn_chunk`` when everything is finite."""
    last, count, heads, block, iterations, temperature = sizes.values()
    layout = lay_out(positions, valid, block=block, count=count)
    qh, kh, vh = prepare_heads(q, k, v, valid, heads)
    qs, ks, vs = (layout.arrange(a) for a in (qh, kh, vh))
    P, some = permutation(
        qs, ks, sorting, layout.there, iterations=iterations, temperature=temperature, gumbel=False, causal=True
    )
    mine = layout.number[:, -last:].clamp_max(count - 1)
    rows = P.gather(2, mine[:, None, :, None].expand(-1, heads, -1, count)).to(ks.dtype)
    keys, values = (torch.einsum("bhtj,bhjue->bhtue", rows, a).to(a.dtype) for a in (ks, vs))
    held = ((some.to(torch.float32) @ layout.there.to(torch.float32)) > 0).gather(
        1, mine[..., None].expand(-1, -1, block)
    )
    offset = (positions - torch.div(positions, block, rounding_mode="floor") * block)[:, -last:]
    near = layout.there.gather(1, mine[..., None].expand(-1, -1, block)) & (
        torch.arange(block, device=q.device) <= offset[..., None]
    )
    at = mine[:, None, :, None, None].expand(-1, heads, -1, block, qh.shape[-1])
    own_k, own_v = ks.gather(2, at), vs.gather(2, at)
    asks = qh[:, :, -last:, None] * qh.shape[-1] ** -0.5
    ok = torch.cat([near, held], -1)[:, None, :, None]
    y = ratio(sums_of(asks, torch.cat([own_k, keys], 3), torch.cat([own_v, values], 3), ok))[:, :, :, 0]
    return torch.where(valid[:, -last:, None], y.transpose(1, 2).flatten(2), 0.0)
