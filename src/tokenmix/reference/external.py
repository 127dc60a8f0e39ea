"""External attention (Guo et al. 2021) as written, token by token, and the simplified self-attention it is based on."""

from __future__ import annotations

import torch
from torch import Tensor


def external(
    x,
    memory_k,
    memory_v,
    memory_k_bias=None,
    memory_v_bias=None,
    *,
    heads: int = 1,
    norm: str = "double",
    eps: float = 1e-9,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute A = Norm(F M_k^T), F_out = A M_v.

    Token t is normalised against the tokens it may attend, of which it must be one.
    """
    logits = x.unflatten(-1, (heads, -1)) @ memory_k.mT  # (B, T, heads, S)
    if memory_k_bias is not None:
        logits = logits + memory_k_bias
    rows = []
    for t in range(x.shape[1]):
        ok = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask[:, t]
        valid = ok[:, t, None, None]
        seen = torch.where(
            ok.any(1)[:, None, None, None], logits.masked_fill(~ok[:, :, None, None], float("-inf")), 0.0
        )
        over_tokens = torch.where(valid, torch.softmax(seen, 1)[:, t], 0.0)  # (B, heads, S)
        weights = over_tokens
        if norm == "double":
            weights = over_tokens / (eps + over_tokens.sum(-1, keepdim=True) + (~valid).double())
        if norm == "slots":
            weights = torch.softmax(logits[:, t], -1)
        y = weights @ memory_v + (0 if memory_v_bias is None else memory_v_bias)
        rows.append(torch.where(valid, y, 0.0).flatten(1))
    return torch.stack(rows, 1)


def simplified_attention(x: Tensor, k: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Compute softmax(F F^T) F, here with the keys given; nothing to attend gives 0."""
    logits = scale * x @ k.mT
    if mask is None:
        return torch.softmax(logits, -1) @ k
    logits = torch.where(mask.any(-1, keepdim=True), logits.masked_fill(~mask, float("-inf")), 0.0)
    return torch.where(mask, torch.softmax(logits, -1), 0.0) @ k
