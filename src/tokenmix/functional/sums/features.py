"""Sums over keys of phi(k) v for kernel attention with positive features, exact for features of any size.

A pair weighs phi(q_t) . phi(k_s) = sum_i exp(a_ti + b_si), with a and b the logarithms of the features. Each feature i
has its own running maximum of b, so no key that matters is lost however far apart the features lie. The query then
takes the largest a_ti + max b_i over i as its unit, which cancels between numerator and denominator. The denominator is
therefore at least 1 wherever there is anything to attend, and nothing is added to it.

Causal sums run in blocks of ``SCAN`` tokens. Within a block there is a (SCAN, SCAN) matrix of weights, with its running
maxima cut as in ``softmax.over_leaf``; between blocks there are prefix sums of ``Sums``, whose c' are the M features
and whose g are the e channels of a value. Everything is float64.

Shapes: a (B, H, T, M), b (B, H, S, M), values v1 (B, H, S, e + 1) whose last channel is 1. A feature equal to zero has
the logarithm MASKED_KEY.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.backend import is_exporting
from ..layout.heads import by_head
from ..layout.masks import zero_masked as zero_masked
from .softmax import FLOOR, MASKED_KEY, SCAN, SCAN_JUMP, Sums, cut_running_max, delay, merge, scan

Past = tuple[Tensor, Tensor]  # m (B, H, M), acc (B, H, e + 1, M): a streaming state


def wide_by_head(a: Tensor, heads: int) -> Tensor:
    """Split (B, T, H e) into float64 heads (B, H, T, e)."""
    return by_head(a.double(), heads)


def joined_heads(y: Tensor, like: Tensor) -> Tensor:
    """Merge the heads of (B, H, T, e) into (B, T, H e) in the dtype of ``like``."""
    return y.transpose(1, 2).flatten(2).to(like.dtype)


def masked_features(b: Tensor, key_mask: Tensor | None) -> Tensor:
    """Mask log-features (B, H, S, M): masked keys get a weight of zero."""
    return b if key_mask is None else torch.where(key_mask[:, None, :, None], b, MASKED_KEY)


def with_ones(v: Tensor, heads: int) -> Tensor:
    """Split values (B, S, H e) into (B, H, S, e + 1), with a last channel of ones that sums to the denominator."""
    return F.pad(wide_by_head(v, heads), (0, 1), value=1.0)


def over_keys(b: Tensor, v1: Tensor) -> Sums:
    """Sum over all keys: m (..., 1, M), acc (..., 1, e + 1, M)."""
    m = b.detach().amax(-2, keepdim=True).clamp_min(FLOOR)
    acc = v1.transpose(-1, -2) @ torch.exp(b - m)
    return Sums(m, torch.zeros_like(m), acc[..., None, :, :])


def read(a: Tensor, s: Sums) -> Tensor:
    """Read the same sums with every query: (..., T, e)."""
    z = a + s.m
    unit = z.detach().amax(-1, keepdim=True).clamp_min(FLOOR)
    return ratio(torch.exp(z - unit + s.lift) @ s.acc.squeeze(-3).transpose(-1, -2))


def ratio(sums: Tensor) -> Tensor:
    """Divide numerator by denominator in (..., T, e + 1), giving exactly 0 where nothing was summed."""
    num, den = sums[..., :-1], sums[..., -1:]
    return num / torch.where(den > 0, den, 1.0)


def causal_read(a: Tensor, b: Tensor, v1: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
    """Read ``past`` and keys 0..t with query t: (B, H, T, e), and return the sums after the last key as well."""
    T = a.shape[-2]
    (ab, vb), bb = in_blocks((a, v1), 0.0), in_blocks((b,), MASKED_KEY)[0]
    before, last = prefix_of_blocks(bb, lambda top, rise: vb.transpose(-1, -2) @ torch.exp(bb - top + rise), past)
    return _leaf(ab, bb, vb, before).flatten(-3, -2)[..., :T, :], last


def in_blocks(tensors: tuple[Tensor, ...], fill: float) -> list[Tensor]:
    """Cut tensors (..., T, c) into blocks (..., n, size, c).

    n is a multiple of the number of groups that ``prefix_of_blocks`` forms from them.
    """
    T = tensors[0].shape[-2]
    size = min(SCAN, T)
    groups = -(-T // (size * SCAN))
    step = size * groups
    return [F.pad(x, (0, 0, 0, -T % step), value=fill).unflatten(-2, (-1, size)) for x in tensors]


def prefix_of_blocks(b: Tensor, sums_of: Callable[[Tensor, Tensor], Tensor], past: Past | None) -> tuple[Sums, Past]:
    """Sum over ``past`` and all blocks before each block, (..., n, 1, .), and return the state after the last one.

    Groups of up to SCAN blocks share units as the rows of ``softmax.over_leaf`` do, so that one cumulative sum joins
    them; groups are joined by doubling.

    Args:
        b: log-weights (..., n, size, c').
        sums_of: the sums acc (..., n, e + 1, M) of each block in the units exp(top - rise), both (..., n, 1, c').
    """
    n, size = b.shape[-3:-1]
    groups = -(-n // SCAN)
    top, rise = cut_running_max(b.detach().amax(-2).unflatten(-2, (groups, -1)), SCAN_JUMP)
    top, rise = top[..., None, :], rise[..., None, :]  # (..., groups, blocks, 1, c')
    acc = sums_of(top.flatten(-4, -3), rise.flatten(-4, -3)).unflatten(-3, (groups, -1)).cumsum(-3)
    within = Sums(top, -rise, acc[..., None, :, :])
    ends = scan(Sums(*(x.select(d, -1) for x, d in zip(within, (-3, -3, -4), strict=True))))
    before, carried = delay(within, 1), delay(ends, 1)
    last = Sums(ends.m[..., -1:, :, :], ends.lift[..., -1:, :, :], ends.acc[..., -1:, :, :, :])
    if past is not None:
        carried, last = merge(carried, as_block(past)), merge(last, as_block(past))
    if groups > 1 or past is not None:
        before = merge(
            before, Sums(carried.m[..., None, :, :], carried.lift[..., None, :, :], carried.acc[..., None, :, :, :])
        )
    return Sums(before.m.flatten(-4, -3), before.lift.flatten(-4, -3), before.acc.flatten(-5, -4)), flatten_sums(last)


def _leaf(a: Tensor, b: Tensor, v1: Tensor, before: Sums | None) -> Tensor:
    """Read the sums before each block, if any, and the block's own keys up to the query: (..., n, size, e)."""
    top, rise = cut_running_max(b, SCAN_JUMP)
    here = a + top
    there = here if before is None else a + before.m
    unit = torch.maximum(here, there).detach().amax(-1, keepdim=True).clamp_min(FLOOR)
    weights = torch.exp(here - unit - rise) @ torch.exp(b - top + rise).transpose(-1, -2)
    seen = torch.ones(weights.shape[-2:], dtype=torch.bool, device=a.device).tril()
    near = torch.where(seen, weights, 0.0) @ v1  # pairs that are not seen may have overflowed
    if before is None:
        return ratio(near)
    return ratio(near + torch.exp(there - unit + before.lift) @ before.acc.squeeze(-3).transpose(-1, -2))


def as_total(past: Past) -> Sums:
    """View a state as the sums over all keys (B, H, 1, .)."""
    m, acc = (x.double()[:, :, None] for x in past)
    return Sums(m, torch.zeros_like(m), acc)


def as_block(past: Past) -> Sums:
    """View a state as one block of sums (B, H, 1, 1, .)."""
    return Sums(*(x[:, :, None] for x in as_total(past)))


def flatten_sums(s: Sums) -> Past:
    """Turn one block of sums, or sums without blocks, into a state in units of exp(m)."""
    acc = s.acc * torch.exp(s.lift)[..., None, :]
    return s.m.reshape(*s.m.shape[:2], s.m.shape[-1]).contiguous(), acc.reshape(*acc.shape[:2], *acc.shape[-2:])


def merge_past(earlier: Past, later: Past) -> Past:
    """Return the state after two adjacent stretches of tokens."""
    return flatten_sums(merge(as_block(earlier), as_block(later)))


def empty_features(
    batch: int, heads: int, features: int, width: int, *, device: torch.device | str | None = None
) -> Past:
    """Return the state before any token."""
    m = torch.full((batch, heads, features), FLOOR, device=device, dtype=torch.float64)
    return m, torch.zeros(batch, heads, width + 1, features, device=device, dtype=torch.float64)


def absorb(b: Tensor, v1: Tensor) -> Past:
    """Return the state after these keys alone; there may be none."""
    if b.shape[-2] == 0:
        return empty_features(b.shape[0], b.shape[1], b.shape[-1], v1.shape[-1] - 1, device=b.device)
    return flatten_sums(over_keys(b, v1))


def mix_features(a: Tensor, b: Tensor, v1: Tensor, *, causal: bool) -> Tensor:
    """Mix all tokens: (B, H, T, e)."""
    if a.shape[-2] == 0 or b.shape[-2] == 0:
        return a.new_zeros(*a.shape[:-1], v1.shape[-1] - 1)
    (T, M), (S, width) = a.shape[-2:], v1.shape[-2:]
    if is_exporting():  # no choice by length, which may be a symbol
        return causal_read(a, b, v1)[0] if causal else read(a, over_keys(b, v1))
    if causal:
        return _leaf(a, b, v1, None) if T <= SCAN else causal_read(a, b, v1)[0]
    return _by_pairs(a, b, v1) if T * S * (M + width) < (T + S) * M * width else read(a, over_keys(b, v1))


def _by_pairs(a: Tensor, b: Tensor, v1: Tensor) -> Tensor:
    """Read all keys with every query through the weights of the pairs.

    This needs fewer products when there are fewer tokens than features.
    """
    m = b.detach().amax(-2, keepdim=True).clamp_min(FLOOR)
    z = a + m
    unit = z.detach().amax(-1, keepdim=True).clamp_min(FLOOR)
    return ratio(torch.exp(z - unit) @ torch.exp(b - m).transpose(-1, -2) @ v1)
