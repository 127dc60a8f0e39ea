"""Masks: True = may be attended."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError


def allowed(
    B: int, T: int, S: int, *, causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, device: torch.device
) -> Tensor:
    """Combine all masks into one bool (B, T, S); with T < S, causal lets the last query see every key."""
    check_keys(key_mask, B, S)
    if attn_mask is not None and (
        attn_mask.dtype != torch.bool or attn_mask.ndim not in (2, 3) or attn_mask.shape[-2:] != (T, S)
    ):
        given = f"{attn_mask.dtype} {tuple(attn_mask.shape)}"
        raise MixerError(
            f"expects a bool attn_mask of shape {(T, S)} or {(B, T, S)}, True = may be attended, got {given}."
        )
    ok = torch.ones(1, T, S, dtype=torch.bool, device=device)
    if causal:
        ok = ok.tril(S - T)
    if key_mask is not None:
        ok = ok & key_mask[:, None]
    if attn_mask is not None:
        ok = ok & attn_mask
    return ok.expand(B, T, S)


def check_keys(key_mask: Tensor | None, B: int, S: int) -> None:
    """Refuse anything but a bool mask of S keys; one row may serve the whole batch."""
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.ndim != 2 or key_mask.shape[1] != S):
        given = f"{key_mask.dtype} {tuple(key_mask.shape)}"
        raise MixerError(f"expects a bool key_mask of shape {(B, S)}, True = may be attended, got {given}.")


def valid_mask(a: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return the key mask (B, T) of a (B, T, ..), all True if none was given."""
    return torch.ones(a.shape[:2], dtype=torch.bool, device=a.device) if key_mask is None else key_mask


def zero_masked(a: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return a (B, T, D) with 0 at masked tokens, whatever they held."""
    return a if key_mask is None else torch.where(key_mask[..., None], a, 0.0)


def pad_zeros(a: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Pad with zeros as ``F.pad`` does, also over no features, which torch 2.9 refuses."""
    if 0 not in a.shape[-2:]:
        return F.pad(a, widths)
    size = list(a.shape)
    for i, width in enumerate(widths):
        size[-1 - i // 2] += width
    return a.new_zeros(size)
