"""Sums of c_ts exp(k_s) v_s with factors c of either sign, and numerators that are not divided.

The factors multiply exp(k), so no logarithm of them is taken and their gradient is defined at 0. The denominator is the
sum of exp(k) over the keys a row attends, without the factors, since a signed one could vanish. Shapes are those of
``softmax``.
"""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from .softmax import (
    FLOOR,
    LITERAL_ELEMENTS,
    MASKED_KEY,
    WEIGHT_CAP,
    Sums,
    over_all,
    prefix_sums,
    ratio_of,
    terms_of,
)


def finish_sums(s: Sums, divide: bool) -> Tensor:
    """Return the ratio (..., T, c), or with ``divide=False`` the numerator."""
    if divide:
        return ratio_of(s)
    return (s.acc[..., :-1, :] * torch.exp(s.m + s.lift)[..., None, :]).flatten(-2)


def cap_keys(k: Tensor, divide: bool) -> Tensor:
    """Return keys whose exponentials stay finite in float64 where nothing divides them: above 300 they count as 300."""
    return k if divide else k.clamp_max(WEIGHT_CAP)


def factors_of(w: Tensor, signed: bool) -> Tensor:
    """Return the factors of exp(k): w itself if ``signed``, else exp(w); in float64."""
    return w.double() if signed else torch.exp(w.double().clamp_max(WEIGHT_CAP))


def over_factors(k: Tensor, v: Tensor, c: Tensor) -> Sums:
    """Sum for rows that all see the same keys, with factors c (..., T, S)."""
    s = over_all(k, v)
    terms = terms_of(k - s.m, v)[..., :-1, :]
    return Sums(s.m, s.lift, torch.cat([_product(c, terms), _rows(s.acc[..., -1:, :], c.shape[-2])], -2))


def plain_sums(k: Tensor, v: Tensor, c: Tensor) -> Sums:
    """Sum with factors c (..., T, S) in units of 1, for keys cut by ``cap_keys``; the denominator is not summed."""
    terms = terms_of(k, v)[..., :-1, :]
    acc = _product(c, terms)
    zero = torch.zeros_like(k[..., :1, :])
    return Sums(zero, zero, torch.cat([acc, torch.zeros_like(acc[..., :1, :])], -2))


def literal_factors(k: Tensor, v: Tensor, c: Tensor, mask: Tensor) -> Sums:
    """Sum with factors c (..., T, S) under each row's own maximum over the pairs that ``mask`` (..., T, S) allows."""
    T, rows = c.shape[-2], max(1, LITERAL_ELEMENTS // max(1, v.numel()))
    parts = []
    for start in range(0, T, rows):
        keep, z = mask[..., start : start + rows, :, None], k[..., None, :, :]
        top = z.detach().masked_fill(~keep, FLOOR).amax(-2, keepdim=True).clamp_min(FLOOR)
        e = torch.exp((z - top).masked_fill(~keep, float("-inf")))[..., None, :]  # (..., rows, S, 1, c')
        num = (c[..., start : start + rows, :, None, None] * e * v[..., None, :, :, :]).sum(-3)
        parts.append((top[..., 0, :], torch.cat([num, e.sum(-3)], -2)))
    m, acc = (torch.cat(same, axis) for same, axis in zip(zip(*parts, strict=True), (-2, -3), strict=True))
    return Sums(m, torch.zeros_like(m), acc)


def tap_sums(k: Tensor, v: Tensor, taps: Tensor, low: int, *, everywhere: bool, causal: bool) -> Sums:
    """Sum over a window with factors taps (h, s), tap j for the key at t + low + j; takes time O(T s).

    Args:
        everywhere: add exp(k) v of every key (of every earlier one if ``causal``), inside and outside of the window.
    """
    T, size = k.shape[-2], taps.shape[-1]
    ends = -low, size - 1 + low
    kp, vp = F.pad(k, (0, 0, *ends), value=MASKED_KEY), F.pad(v, (0, 0, 0, 0, *ends))
    near = [kp[..., j : j + T, :] for j in range(size)]
    if everywhere:
        base = prefix_sums(k, v) if causal else over_all(k, v)
        top, num, den = base.m + base.lift, base.acc[..., :-1, :], base.acc[..., -1:, :]
    else:
        top, num, den = reduce(torch.maximum, near).detach().clamp_min(FLOOR), None, None
    for j, keys in enumerate(near):
        e = torch.exp(keys - top)[..., None, :]
        here = taps[:, j, None, None, None].double() * e * vp[..., j : j + T, :, :]
        num = here if num is None else num + here
        if not everywhere:
            den = e if den is None else den + e
    assert num is not None
    assert den is not None
    return Sums(top, torch.zeros_like(top), torch.cat([num, _rows(den, T)], -2))


def _product(c: Tensor, terms: Tensor) -> Tensor:
    """Compute sum_s c_ts terms_s: (..., T, S) and (..., S, g, c') -> (..., T, g, c')."""
    return (c @ terms.flatten(-2)).unflatten(-1, terms.shape[-2:])


def _rows(den: Tensor, T: int) -> Tensor:
    """Repeat denominators that all T rows share."""
    return den.expand(*den.shape[:-3], T, *den.shape[-2:])
