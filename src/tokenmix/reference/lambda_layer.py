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
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    positions: Tensor | None = None,
    causal_taps: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute y_n = (sum_m (softmax(K)_m + E_nm) v_m^T)^T q_n, the same lambdas for every head."""
    B, T, w = k.shape
    mask = torch.ones(B, T, T, dtype=torch.bool) if mask is None else mask
    positions = torch.arange(T).expand(B, T) if positions is None else positions
    E = _embeddings(embedding, positions - prefix, grid, causal_taps)
    logits = k[:, None].expand(B, T, T, w).masked_fill(~mask[..., None], float("-inf"))
    some = mask.any(2)[:, :, None, None]
    content = torch.softmax(torch.where(some, logits, 0.0), 2)
    values = torch.where(mask.any(1)[..., None], v, 0.0)
    lambdas = torch.einsum("bnmw,bmc->bnwc", torch.where(mask[..., None], content + E, 0.0), values)
    return torch.cat([torch.einsum("bnw,bnwc->bnc", q[..., h * w : (h + 1) * w], lambdas) for h in range(heads)], -1)


def _embeddings(embedding: Tensor, positions: Tensor, grid: tuple[int, ...] | None, causal_taps: bool) -> Tensor:
    """Return E_nm (B, T, T, w), 0 beyond the embeddings, and to and from tokens outside the grid."""
    axes = [positions] if grid is None else [positions // grid[1], positions % grid[1]]
    inside = torch.ones_like(positions[:, :, None], dtype=torch.bool)
    if grid is not None:
        inside = (positions[:, :, None] >= 0) & (positions[:, None, :] >= 0)
    index = []
    for axis, s in zip(axes, embedding.shape[:-1], strict=True):
        step = axis[:, None, :] - axis[:, :, None] + (s - 1 if causal_taps else s // 2)
        inside = inside & (step >= 0) & (step < s)
        index.append(step.clamp(0, s - 1))
    return torch.where(inside[..., None], embedding[tuple(index)], 0.0)
