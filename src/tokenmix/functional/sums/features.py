"""Sums over keys of phi(k) v for kernel attention with positive features, exact for features of any size.

A pair weighs phi(q_t) . phi(k_s) = sum_i exp(a_ti + b_si), with a and b the logarithms of the features. Each feature i has its own running maximum of b,
so no key that matters is lost however far the features lie apart; the query then takes the largest of a_ti + max b_i over i as its unit, which cancels
between numerator and denominator. So the denominator is at least 1 wherever there is anything to attend, and nothing is added to it.

Causal: blocks of ``SCAN`` tokens. Within a block a (SCAN, SCAN) matrix of weights, its running maxima cut as in ``_sums.over_leaf``; between
blocks prefix sums of ``Sums``, whose c' are the M features and whose g are the e channels of a value. Everything is float64.

Shapes: a (B, H, T, M), b (B, H, S, M), values v1 (B, H, S, e + 1) whose last channel is 1. A feature that is zero has the logarithm DEAD.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import exporting
from ..layout.heads import by_head
from ..layout.masks import zero_masked as zero_masked
from .softmax import FLOOR, MASKED_KEY, SCAN, SCAN_JUMP, Sums, delay, merge, risen, scan

Past = tuple[Tensor, Tensor]  # m (B, H, M), acc (B, H, e + 1, M): a streaming state


def wide_by_head(a: Tensor, heads: int) -> Tensor:
    """(B, T, H e) as float64 (B, H, T, e)."""
    return by_head(a.double(), heads)


def joined_heads(y: Tensor, like: Tensor) -> Tensor:
    """(B, H, T, e) back to (B, T, H e) in the dtype of ``like``."""
    return y.transpose(1, 2).flatten(2).to(like.dtype)


def masked_features(b: Tensor, key_mask: Tensor | None) -> Tensor:
    """Log-features (B, H, S, M) that weigh nothing where a key may not be attended."""
    return b if key_mask is None else torch.where(key_mask[:, None, :, None], b, MASKED_KEY)


def with_ones(v: Tensor, heads: int) -> Tensor:
    """Values (B, S, H e) as (B, H, S, e + 1), the last channel 1: what sums to the denominator."""
    return F.pad(wide_by_head(v, heads), (0, 1), value=1.0)


def over_keys(b: Tensor, v1: Tensor) -> Sums:
    """The sums over all keys: m (..., 1, M), acc (..., 1, e + 1, M)."""
    m = b.detach().amax(-2, keepdim=True).clamp_min(FLOOR)
    acc = v1.transpose(-1, -2) @ torch.exp(b - m)
    return Sums(m, torch.zeros_like(m), acc[..., None, :, :])


def read(a: Tensor, s: Sums) -> Tensor:
    """Every query over the same sums: (..., T, e)."""
    z = a + s.m
    unit = z.detach().amax(-1, keepdim=True).clamp_min(FLOOR)
    return ratio(torch.exp(z - unit + s.lift) @ s.acc.squeeze(-3).transpose(-1, -2))


def ratio(sums: Tensor) -> Tensor:
    """Numerator / denominator of (..., T, e + 1), and exactly 0 where nothing was summed."""
    num, den = sums[..., :-1], sums[..., -1:]
    return num / torch.where(den > 0, den, 1.0)


def causal_read(a: Tensor, b: Tensor, v1: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
    """Query t over ``past`` and keys 0..t: (B, H, T, e), and the sums after the last key."""
    T = a.shape[-2]
    (ab, vb), bb = in_blocks((a, v1), 0.0), in_blocks((b,), MASKED_KEY)[0]
    before, last = prefix_of_blocks(bb, lambda top, rise: vb.transpose(-1, -2) @ torch.exp(bb - top + rise), past)
    return _leaf(ab, bb, vb, before).flatten(-3, -2)[..., :T, :], last


def in_blocks(tensors: tuple[Tensor, ...], fill: float) -> list[Tensor]:
    """Tensors (..., T, c) cut into blocks (..., n, size, c); n is a multiple of the number of groups ``prefix_of_blocks`` makes of them."""
    T = tensors[0].shape[-2]
    size = min(SCAN, T)
    groups = -(-T // (size * SCAN))
    step = size * groups
    return [F.pad(x, (0, 0, 0, -T % step), value=fill).unflatten(-2, (-1, size)) for x in tensors]


def prefix_of_blocks(b: Tensor, sums_of: Callable[[Tensor, Tensor], Tensor], past: Past | None) -> tuple[Sums, Past]:
    """The sums over ``past`` and all blocks before each, (..., n, 1, .), and the state after the last.

    Groups of up to SCAN blocks share units as the rows of ``_sums.over_leaf`` do, so that one cumulative sum joins them; groups are joined by doubling.

    Args:
        b: log-weights (..., n, size, c').
        sums_of: the sums acc (..., n, e + 1, M) of each block in the units exp(top - rise), both (..., n, 1, c').
    """
    n, size = b.shape[-3:-1]
    groups = -(-n // SCAN)
    top, rise = risen(b.detach().amax(-2).unflatten(-2, (groups, -1)), SCAN_JUMP)
    top, rise = top[..., None, :], rise[..., None, :]  # (..., groups, blocks, 1, c')
    acc = sums_of(top.flatten(-4, -3), rise.flatten(-4, -3)).unflatten(-3, (groups, -1)).cumsum(-3)
    within = Sums(top, -rise, acc[..., None, :, :])
    ends = scan(Sums(*(x.select(d, -1) for x, d in zip(within, (-3, -3, -4), strict=True))))
    before, carried = delay(within, 1), delay(ends, 1)
    last = Sums(ends.m[..., -1:, :, :], ends.lift[..., -1:, :, :], ends.acc[..., -1:, :, :, :])
    if past is not None:
        carried, last = merge(carried, lifted(past)), merge(last, lifted(past))
    if groups > 1 or past is not None:
        before = merge(before, Sums(carried.m[..., None, :, :], carried.lift[..., None, :, :], carried.acc[..., None, :, :, :]))
    return Sums(before.m.flatten(-4, -3), before.lift.flatten(-4, -3), before.acc.flatten(-5, -4)), flat(last)


def _leaf(a: Tensor, b: Tensor, v1: Tensor, before: Sums | None) -> Tensor:
    """Each block's queries over the sums before the block, if any, and over its own keys up to theirs: (..., n, size, e)."""
    top, rise = risen(b, SCAN_JUMP)
    here = a + top
    there = here if before is None else a + before.m
    unit = torch.maximum(here, there).detach().amax(-1, keepdim=True).clamp_min(FLOOR)
    weights = torch.exp(here - unit - rise) @ torch.exp(b - top + rise).transpose(-1, -2)
    seen = torch.ones(weights.shape[-2:], dtype=torch.bool, device=a.device).tril()
    near = torch.where(seen, weights, 0.0) @ v1  # what is not seen may have overflowed
    if before is None:
        return ratio(near)
    return ratio(near + torch.exp(there - unit + before.lift) @ before.acc.squeeze(-3).transpose(-1, -2))


def whole(past: Past) -> Sums:
    """A state as the sums over all keys (B, H, 1, .)."""
    m, acc = (x.double()[:, :, None] for x in past)
    return Sums(m, torch.zeros_like(m), acc)


def lifted(past: Past) -> Sums:
    """A state as one block of sums (B, H, 1, 1, .)."""
    return Sums(*(x[:, :, None] for x in whole(past)))


def flat(s: Sums) -> Past:
    """One block of sums, or sums without blocks, as a state in units of exp(m)."""
    acc = s.acc * torch.exp(s.lift)[..., None, :]
    return s.m.reshape(*s.m.shape[:2], s.m.shape[-1]).contiguous(), acc.reshape(*acc.shape[:2], *acc.shape[-2:])


def merge_past(earlier: Past, later: Past) -> Past:
    """The state after two adjacent stretches."""
    return flat(merge(lifted(earlier), lifted(later)))


def nothing(batch: int, heads: int, features: int, width: int, *, device: torch.device | str | None = None) -> Past:
    """The state that has seen nothing."""
    m = torch.full((batch, heads, features), FLOOR, device=device, dtype=torch.float64)
    return m, torch.zeros(batch, heads, width + 1, features, device=device, dtype=torch.float64)


def absorb(b: Tensor, v1: Tensor) -> Past:
    """The state after these keys alone, none of them included."""
    if b.shape[-2] == 0:
        return nothing(b.shape[0], b.shape[1], b.shape[-1], v1.shape[-1] - 1, device=b.device)
    return flat(over_keys(b, v1))


def mixed(a: Tensor, b: Tensor, v1: Tensor, *, causal: bool) -> Tensor:
    """The whole mixing (B, H, T, e)."""
    if a.shape[-2] == 0 or b.shape[-2] == 0:
        return a.new_zeros(*a.shape[:-1], v1.shape[-1] - 1)
    (T, M), (S, width) = a.shape[-2:], v1.shape[-2:]
    if exporting():  # no choice by length: it may be a symbol
        return causal_read(a, b, v1)[0] if causal else read(a, over_keys(b, v1))
    if causal:
        return _leaf(a, b, v1, None) if T <= SCAN else causal_read(a, b, v1)[0]
    return _by_pairs(a, b, v1) if T * S * (M + width) < (T + S) * M * width else read(a, over_keys(b, v1))


def _by_pairs(a: Tensor, b: Tensor, v1: Tensor) -> Tensor:
    """Every query over all keys by the weights of the pairs, which takes fewer products where there are fewer tokens than features."""
    m = b.detach().amax(-2, keepdim=True).clamp_min(FLOOR)
    z = a + m
    unit = z.detach().amax(-1, keepdim=True).clamp_min(FLOOR)
    return ratio(torch.exp(z - unit) @ torch.exp(b - m).transpose(-1, -2) @ v1)
