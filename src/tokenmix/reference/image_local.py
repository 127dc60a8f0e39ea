"""Local attention of the Image Transformer (Parmar et al. 2018, Sec. 3.2.1 and 3.2.2) as written.

The memory of a query block is spelled out pixel by pixel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attention


def image_local(
    q, k, v, *, heads, block, memory, width=None, grid=None, prefix=0, positions=None, starts=None, mask=None
) -> Tensor:
    """Compute softmax attention over the memory block of each query; tokens before a row's start give 0."""
    B, T = q.shape[:2]
    positions = torch.arange(T).expand(B, T) if positions is None else positions
    positions = positions if starts is None else positions - starts[:, None]
    seen = torch.zeros(B, T, T, dtype=torch.bool)
    width = width if grid is None else grid[1]
    for b in range(B):
        at = positions[b] - prefix
        t, s = at[:, None], at[None, :]
        if len(block) == 1:
            first = t // block[0] * block[0]
            near = (s >= first - memory[0]) & (s < first + block[0])
        else:
            top, left = t // width // block[0] * block[0], t % width // block[1] * block[1]
            near = (s // width >= top - memory[0]) & (s // width < top + block[0])
            near &= (s % width >= left - memory[1]) & (s % width < left + block[1] + memory[1])
        seen[b] = (near & (t >= 0) & (s >= 0)) | ((positions[b] < prefix)[:, None] | (positions[b] < prefix)) & (
            positions[b] >= 0
        )[:, None]
    seen &= (positions >= 0)[:, :, None]
    return attention(q, k, v, heads=heads, mask=seen if mask is None else seen & mask)
