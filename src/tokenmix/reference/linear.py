"""Linear attention (Katharopoulos et al. 2020) as written: every pair weighs phi(q) . phi(k)."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, heads: int, feature: str = "elu", mask: Tensor | None = None
) -> Tensor:
    """Compute Eq. 4: sum_s phi(q_t) . phi(k_s) v_s / sum_s phi(q_t) . phi(k_s), head by head.

    The result is 0 where the denominator is 0.
    """
    phi = _FEATURES[feature]
    outputs = []
    for qh, kh, vh in zip(*(a.chunk(heads, -1) for a in (q, k, v)), strict=True):
        weights = phi(qh) @ phi(kh).transpose(-1, -2)
        if mask is not None:
            weights = torch.where(mask, weights, 0.0)
        total = weights.sum(-1, keepdim=True)
        outputs.append(weights @ vh / torch.where(total > 0, total, 1.0))
    return torch.cat(outputs, -1)


_FEATURES = {
    "elu": lambda x: torch.where(
        x > 0, x + 1, torch.exp(x.clamp_max(0))
    ),  # elu(x) + 1, without rounding away exp(-100)
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x) ** 2,
    "exp": torch.exp,
    "softmax": lambda x: torch.softmax(x, -1),
}
