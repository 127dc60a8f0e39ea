"""Masks: True = may be attended."""

from __future__ import annotations

import torch
from torch import Tensor


def allowed(B: int, T: int, S: int, *, causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, device: torch.device) -> Tensor:
    """All masks ANDed into one bool (B, T, S); with T < S, causal lets the last query see every key."""
    ok = torch.ones(1, T, S, dtype=torch.bool, device=device)
    if causal:
        ok = ok.tril(S - T)
    if key_mask is not None:
        ok = ok & key_mask[:, None]
    if attn_mask is not None:
        ok = ok & attn_mask
    return ok.expand(B, T, S)
