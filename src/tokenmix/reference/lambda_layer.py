"""The lambda layer (Bello 2021, Eq. 1 and 2) as written: a matrix per query, of content and of position."""

from __future__ import annotations

import torch
from torch import Tensor


def lambda_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    embedding: Tensor,
    *,
    heads: int,
    positions: Tensor | None = None,
    causal_taps: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """y_n = (sum_m (softmax(K)_m + E_nm) v_m^T)^T q_n, the same lambdas for every head."""
    (B, T, w), s = k.shape, embedding.shape[0]
    mask = torch.ones(B, T, T, dtype=torch.bool) if mask is None else mask
    place = torch.arange(T).expand(B, T) if positions is None else positions
    row = place[:, None, :] - place[:, :, None] + (s - 1 if causal_taps else s // 2)
    inside = (row >= 0) & (row < s)
    E = torch.where(inside[..., None], embedding[row.clamp(0, s - 1)], 0.0)  # (B, T, T, w)
    logits = k[:, None].expand(B, T, T, w).masked_fill(~mask[..., None], float("-inf"))
    some = mask.any(2)[:, :, None, None]
    content = torch.softmax(torch.where(some, logits, 0.0), 2)
    values = torch.where(mask.any(1)[..., None], v, 0.0)
    lambdas = torch.einsum("bnmw,bmc->bnwc", torch.where(mask[..., None], content + E, 0.0), values)
    return torch.cat([torch.einsum("bnw,bnwc->bnc", q[..., h * w : (h + 1) * w], lambdas) for h in range(heads)], -1)
