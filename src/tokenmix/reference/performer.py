"""Performer (Choromanski et al. 2021) as written: every pair weighs phi(q) . phi(k) with random features phi.

The softmax features are multiplied as logarithms, since exp(-|x|^2 / 2) underflows; each row's weights are then divided
by their sum.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor


def performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    heads: int,
    feature: str = "softmax",
    eps: float = 1e-3,
    mask=None,
) -> Tensor:
    """Compute kernel attention, head by head.

    Features are those of Lemma 1 (``softmax``) or max(w . x, 0) / sqrt(M) + eps (``relu``).
    """
    outputs = []
    for h, (qh, kh, vh) in enumerate(zip(*(a.chunk(heads, -1) for a in (q, k, v)), strict=True)):
        if feature == "softmax":
            fq, fk = (_log_positive(a / a.shape[-1] ** 0.25, projection[h]) for a in (qh, kh))
            logits = torch.logsumexp(fq[:, :, None] + fk[:, None], -1)  # log phi(q_t) . phi(k_s)
        else:
            fq, fk = (torch.relu(a @ projection[h].T) / projection.shape[1] ** 0.5 + eps for a in (qh, kh))
            logits = torch.log(fq @ fk.transpose(-1, -2))
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(logits, -1)
        if mask is not None:
            weights = torch.where(mask.any(-1, keepdim=True), weights, 0.0)
        outputs.append(weights @ vh)
    return torch.cat(outputs, -1)


def _log_positive(x: Tensor, w: Tensor) -> Tensor:
    """Compute log phi of Lemma 1: phi(x) = exp(-|x|^2 / 2) / sqrt(M) [exp(w_1 . x), ..., exp(w_M . x)]."""
    return x @ w.T - x.square().sum(-1, keepdim=True) / 2 - log(len(w)) / 2
