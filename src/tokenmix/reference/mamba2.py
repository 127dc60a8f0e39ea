"""Mamba-2 as in its paper, with the recurrence as a sum over all earlier tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mamba2(
    q, k, v, decay, dt, z, skip, weight=None, *, heads, groups=1, norm=True, eps=1e-5, mask: Tensor | None = None
) -> Tensor:
    """Compute y_t = sum_s exp(g_{s+1} + .. + g_t) (q_t . k_s) dt_s v_s + skip v_t, and norm(y_t * silu(z_t)) in groups.

    The sum of log-decays g is over the tokens that the row of the mask allows.
    """
    B, T, _ = q.shape
    mask = torch.ones(B, T, T, dtype=torch.bool).tril() if mask is None else mask
    q, k = (a.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 2) for a in (q, k))
    v = v.unflatten(-1, (heads, -1))
    counted = torch.where(mask[..., None], decay[:, None], 0.0)  # (B, T, S, H): what each row counts
    after = counted.flip(2).cumsum(2).flip(2) - counted
    weights = torch.exp(after) * torch.einsum("bthn,bshn->btsh", q, k) * dt[:, None]
    y = torch.einsum("btsh,bshp->bthp", torch.where(mask[..., None], weights, 0.0), v)
    own = torch.diagonal(mask, dim1=1, dim2=2)[..., None, None]
    y = (y + torch.where(own, skip[:, None] * v, 0.0)).flatten(2) * F.silu(z)
    if not norm or weight is None:
        return y
    apart = y.unflatten(-1, (groups, -1))
    return weight * (apart / (apart.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(2)
