"""The delta rule with decays, as in DeltaNet, Gated DeltaNet and Kimi Delta Attention, with norm and gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_delta(
    q, k, v, decay, beta, z=None, weight=None, *, heads, value_heads=None, norm=True, gate="silu", eps=1e-5, mask=None
) -> Tensor:
    """Compute S_t = e^g S_{t-1} + beta k (v - (e^g S_{t-1})^T k)^T and norm(S_t^T q / sqrt(K)) * gate(z) in each head.

    Each query t has a state of its own, over the tokens of its row of the mask.
    """
    H, (B, T, _) = value_heads or heads, q.shape
    q, k = (a.unflatten(-1, (heads, -1)).repeat_interleave(H // heads, 2) for a in (q, k))
    q, k = (a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt() for a in (q, k))
    v, K = v.unflatten(-1, (H, -1)), k.shape[-1]
    g = torch.zeros_like(beta) if decay is None else decay
    g = (g[..., None].expand(B, T, H, K) if g.shape[-1] == H else g.unflatten(-1, (H, K)))[..., None]
    mask = torch.ones(B, T, T, dtype=torch.bool).tril() if mask is None else mask
    S = q.new_zeros(B, T, H, K, v.shape[-1])
    for s in range(T):
        kept = torch.exp(g[:, None, s]) * S
        short = v[:, None, s] - torch.einsum("bthkv,bhk->bthv", kept, k[:, s])
        after = kept + (beta[:, s, :, None] * k[:, s])[:, None, ..., None] * short[..., None, :]
        S = torch.where(mask[:, :, s, None, None, None], after, S)
    y = torch.einsum("bthkv,bthk->bthv", S, q) / K**0.5
    if norm and weight is not None:
        y = weight * y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    return y.flatten(2) if z is None or gate is None else y.flatten(2) * getattr(F, gate)(z)
