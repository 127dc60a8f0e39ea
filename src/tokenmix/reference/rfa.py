"""Random feature attention (Peng et al. 2021) as its recurrence.

There is one state per query, which meets the keys that the query may attend, in order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rfa(
    q,
    k,
    v,
    projection,
    sigma,
    gate=None,
    *,
    heads: int,
    feature: str = "gaussian",
    eps: float = 0.01,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute y = phi(q) S / phi(q) . z with S = S + phi(k) v, z = z + phi(k).

    RFA-Gate: S = g S + (1 - g) phi(k) v, z = g z + (1 - g) phi(k).
    """
    outputs = []
    for h, (qh, kh, vh) in enumerate(zip(*(a.chunk(heads, -1) for a in (q, k, v)), strict=True)):
        fq, fk = (_phi(a, sigma[h] * projection[h], feature) for a in (qh, kh))
        fk, v1 = torch.cat([fk, torch.ones_like(fk[..., :1])], -1), torch.cat([vh, torch.ones_like(vh[..., :1])], -1)
        # one state per query; the last feature and the last value are 1 and count the weights
        S = q.new_zeros(*q.shape[:2], fk.shape[-1], v1.shape[-1])
        for s in range(k.shape[1]):
            pair = (fk[:, s, :, None] * v1[:, s, None, :])[:, None]
            after = S + pair
            if gate is not None:
                g, rest = (
                    torch.sigmoid(a[:, s, h])[:, None, None, None] for a in (gate, -gate)
                )  # rest = 1 - g, not rounded to 0
                after = g * S + rest * pair
            S = after if mask is None else torch.where(mask[:, :, s, None, None], after, S)
        y, weight = (fq[:, :, None] @ S[:, :, :-1])[:, :, 0], S[:, :, -1, -1:]
        den = torch.maximum(y[..., -1:], eps * weight)
        outputs.append(y[..., :-1] / torch.where(weight > 0, den, 1.0))
    return torch.cat(outputs, -1)


def _phi(x: Tensor, w: Tensor, feature: str) -> Tensor:
    """Compute the features of x scaled to unit length.

    [sin(w x), cos(w x)] / sqrt(M), or the arc-cosine features max(w x, 0) sqrt(2 / M).
    """
    z = F.normalize(x, dim=-1, eps=1e-6) @ w.T
    return (
        torch.relu(z) * (2 / len(w)) ** 0.5
        if feature == "arccos"
        else torch.cat([torch.sin(z), torch.cos(z)], -1) / len(w) ** 0.5
    )
