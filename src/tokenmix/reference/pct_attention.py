"""Offset attention (Guo et al. 2020, "PCT", Eqs. 7 to 9) as written."""

from __future__ import annotations

import torch
from torch import Tensor


def pct_attention(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Compute x - A v: A is the softmax of q k^T over the queries, divided by its sum over the keys.

    The softmax is kept as its logarithm, because a query that loses every key would leave 0 / 0. Masked tokens are
    neither keys nor queries of others; nothing to attend gives 0.
    """
    logits = scale * q.double() @ k.double().mT  # (B, queries, keys)
    member = torch.ones(logits.shape[:2], dtype=torch.bool) if mask is None else mask.any(1)  # tokens that are keys
    others = logits.masked_fill(~member[:, :, None], float("-inf"))  # only those count as queries in a softmax
    spread = logits - torch.where(member.any(1)[:, None, None], torch.logsumexp(others, 1, keepdim=True), 0.0)
    spread = torch.where(member[:, None], spread, torch.finfo(torch.float64).min)
    mixed = torch.where(member[:, None], torch.softmax(spread, -1), 0.0) @ v.double()
    return torch.where(member.any(1)[:, None, None], x.double() - mixed, 0.0)
