"""Linformer (Wang et al. 2020, Eq. 7) as written."""

from __future__ import annotations

import torch
from torch import Tensor


def linformer(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, f: Tensor, *, heads: int, positions=None, mask: Tensor | None = None
) -> Tensor:
    """Compute head_i = softmax(Q W_i^Q (E_i K W_i^K)^T / sqrt(d)) F_i V W_i^V.

    A masked key uses no column of E and F.
    """
    B, S = k.shape[:2]
    d, rows = q.shape[-1] // heads, []
    for b in range(B):
        valid = [s for s in range(S) if mask is None or bool(mask[b, 0, s])]
        columns = [s - valid[0] if positions is None else int(positions[b, s]) for s in valid]
        parts = []
        for i in range(heads):
            mine = slice(i * d, (i + 1) * d)
            short_k = e[i % len(e)][:, columns] @ k[b, valid, mine]
            short_v = f[i % len(f)][:, columns] @ v[b, valid, mine]
            parts.append(torch.softmax(q[b, :, mine] @ short_k.T / d**0.5, -1) @ short_v)
        rows.append(torch.cat(parts, -1))
    return torch.stack(rows)
