"""Numbers of keys, for kernels that divide by them."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_scale(mask: Tensor | None, q: Tensor, S: int, causal: bool, before: Tensor | int = 0) -> Tensor:
    """Return 1 / the number of keys each query may attend, (B, T).

    Args:
        before: of the causal form, the number of keys before the first, an integer or (B, 1).
    """
    (B, T), device = q.shape[:2], q.device
    if causal:
        seen = torch.arange(1, T + 1, dtype=torch.int64, device=device).expand(B, T) if mask is None else mask.cumsum(1)
        seen = (seen + before).clamp_min(1)
    else:
        seen = (
            torch.full((B, T), S, dtype=torch.int64, device=device)
            if mask is None
            else mask.sum(1, keepdim=True).clamp_min(1).expand(B, T)
        )
    return (1.0 / seen.double()).float().contiguous()
