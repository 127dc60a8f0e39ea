"""Transformer-XL's attention with relative positions (Dai et al. 2019, Sec. 3.3) as written, every r_{t-s} in full."""

from __future__ import annotations

import torch
from torch import Tensor


def transformer_xl(
    q, k, v, relative, content, place, *, heads: int, memory: int | None = None, positions=None, mask=None
) -> Tensor:
    """Compute softmax_s([(q_t + u) . k_s + (q_t + v) . W_r R_{t-s}] / sqrt(e)) v_s in each head.

    The sum runs over the keys less than ``memory`` positions away.
    """
    B, T, D = q.shape
    S, e, outputs = k.shape[1], D // heads, []
    positions = (torch.arange(T)[None], torch.arange(S)[None]) if positions is None else positions
    rows, cols = positions if isinstance(positions, tuple) else (positions, positions)
    away = (rows[:, :, None] - cols[:, None, :]).expand(B, T, S)
    near = torch.ones_like(away, dtype=torch.bool) if memory is None else away.abs() < memory
    mask = near if mask is None else mask & near
    n = relative.shape[1] // 2
    angle = away[..., None] / 10000.0 ** (torch.arange(n, dtype=torch.float64) / n)
    r = torch.cat([angle.sin(), angle.cos()], -1) @ relative.T.double()
    for h in range(heads):
        c = slice(h * e, (h + 1) * e)
        about_content = torch.einsum("btc,bsc->bts", q[..., c] + content[c], k[..., c])
        about_place = torch.einsum("btc,btsc->bts", q[..., c] + place[c], r[..., c])
        logits = ((about_content + about_place) / e**0.5).masked_fill(~mask, float("-inf"))
        outputs.append(torch.where(mask.any(-1, keepdim=True), torch.softmax(logits, -1), 0.0) @ v[..., c])
    return torch.cat(outputs, -1)
