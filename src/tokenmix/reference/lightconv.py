"""Lightweight and dynamic convolution (Wu et al. 2019, Eq. 2 and 4) as written, as one weight per pair of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def lightconv(
    x: Tensor, kernel: Tensor, *, positions: Tensor | None = None, causal_taps: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Compute sum_j softmax(W)_j x_{t + j - ceil((s + 1) / 2)}.

    The weights do not depend on which tokens exist.
    """
    B, T, D = x.shape
    H, s = kernel.shape[-2:]
    weights = torch.exp(kernel - kernel.amax(-1, keepdim=True))
    weights = (weights / weights.sum(-1, keepdim=True)).expand(B, T, H, s)
    positions = torch.arange(T).expand(B, T) if positions is None else positions
    y = torch.zeros(B, T, H, D // H, dtype=x.dtype)
    for j in range(s):
        there = positions[:, None, :] == positions[:, :, None] + j - (s - 1 if causal_taps else s // 2)
        if mask is not None:
            there = there & mask
        y = y + weights[..., j, None] * (there.to(x.dtype) @ x).unflatten(-1, (H, -1))
    return y.flatten(2)
