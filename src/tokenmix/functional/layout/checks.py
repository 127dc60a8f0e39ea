"""Input checks that functional forms share; ``who`` is the form, or the mixer that calls it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ...errors import MixerError

LARGE = 2.0**63  # excludes NaN, infinity, and factors too large to scale a tensor by


def check_qkv(who: str, q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool, key_mask: Tensor | None) -> None:
    """Refuse shapes that do not belong together."""
    if q.ndim != 3 or k.ndim != 3 or v.shape != k.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        shapes = ", ".join(str(tuple(a.shape)) for a in (q, k, v))
        raise MixerError(f"{who}: expects q (B, T, D) and k, v (B, S, D), got {shapes}.")
    if not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
        raise MixerError(f"{who}: expects floating point q, k and v, got {q.dtype}, {k.dtype}, {v.dtype}.")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or q.shape[-1] % heads:
        raise MixerError(f"{who}: heads={heads!r} must divide the width {q.shape[-1]} of q, k and v.")
    check_flags(who, causal=causal)
    if causal and q.shape[1] != k.shape[1]:
        raise MixerError(f"{who}: causal=True needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}.")
    check_key_mask(who, key_mask, k)


def check_key_mask(who: str, key_mask: Tensor | None, k: Tensor) -> None:
    """Refuse a mask that is not one bool for each key (B, S, .)."""
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != k.shape[:2]):
        given = f"{key_mask.dtype} {tuple(key_mask.shape)}"
        raise MixerError(f"{who}: expects a bool key_mask of shape {tuple(k.shape[:2])}, got {given}.")


def check_flags(who: str, **flags: object) -> None:
    """Refuse anything but a bool: a kernel takes nothing else, and any string would count as True."""
    for name, value in flags.items():
        if value is not True and value is not False:
            raise MixerError(f"{who}: {name} must be True or False, got {value!r}.")


def check_scale(who: str, scale: object) -> None:
    """Refuse a factor on logits that is not a positive number; None means the default.

    Under a factor of 0 torch's causal attention is NaN.
    """
    if scale is not None and (not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 0 < scale < LARGE):
        raise MixerError(f"{who}: scale must be a positive number, got {scale!r}.")


def check_name(who: str, option: str, name: object, known: Collection[str]) -> None:
    """Refuse a name that is not one of ``known``."""
    if not isinstance(name, str) or name not in known:
        raise MixerError(f"{who}: {option}={name!r} is unknown; choose one of {', '.join(known)}.")


def check_eps(who: str, eps: float, *, zero: bool) -> None:
    """Refuse an eps that is not a finite number, is negative, or is 0 where that would divide by zero."""
    number = isinstance(eps, (int, float)) and not isinstance(eps, bool)
    # compared rather than passed to isfinite, because under a compiler eps may be a symbol
    if not number or not 0 <= eps < LARGE or (eps == 0 and not zero):
        raise MixerError(f"{who}: eps must be a number {'>=' if zero else '>'} 0, got {eps!r}.")
