"""Softmax attention (Vaswani et al. 2017, Eq. 1) as written."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute softmax(Q K^T / sqrt(e) + w) V, head by head; a query that may attend nothing gives 0."""
    kv_heads = kv_heads or heads
    width, outputs = q.shape[-1] // heads, []
    for h in range(heads):
        mine, theirs = slice(h * width, (h + 1) * width), h // (heads // kv_heads) * width
        logits = (
            q[..., mine] @ k[..., theirs : theirs + width].transpose(-1, -2) * (width**-0.5 if scale is None else scale)
        )
        if w is not None:
            logits = logits + w[:, h if w.shape[1] > 1 else 0]
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(logits, -1)
        if mask is not None:
            weights = torch.where(mask.any(-1, keepdim=True), weights, 0.0)
        outputs.append(weights @ v[..., theirs : theirs + width])
    return torch.cat(outputs, -1)
