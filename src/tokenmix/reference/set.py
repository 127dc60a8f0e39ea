"""Attention through induced points (Set Transformer, Lee et al. 2019, Eqs. 6, 7 and 10) as written."""

from __future__ import annotations

import torch
from torch import Tensor


def induced_set(q, k, v, points, maps, block=(), *, heads: int, mask: Tensor | None = None) -> Tensor:
    """Compute ISAB_m(X) = MAB(X, H), H = MAB(I, X).

    Without ``block`` the attentions alone; with it H = LN(A + rFF(A)), A = LN(I + multihead(I, X, X)).
    """
    rows = []
    for b in range(q.shape[0]):
        valid = [s for s in range(k.shape[1]) if mask is None or bool(mask[b, 0, s])]
        if not valid:
            rows.append(torch.zeros_like(q[b]))
            continue
        h = _multihead(points, k[b, valid], v[b, valid], heads)
        if block:
            a = _normal(points + h, block[0], block[1])
            h = _normal(a + torch.relu(a @ block[2].T + block[3]), block[4], block[5])
        shift_k, shift_v = maps[2:] or (0.0, 0.0)
        rows.append(_multihead(q[b], h @ maps[0].T + shift_k, h @ maps[1].T + shift_v, heads))
    return torch.stack(rows)


def _multihead(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Compute softmax(Q_j K_j^T / sqrt(d)) V_j for each head j."""
    d = q.shape[-1] // heads
    parts = [slice(j * d, (j + 1) * d) for j in range(heads)]
    return torch.cat([torch.softmax(q[:, p] @ k[:, p].T / d**0.5, -1) @ v[:, p] for p in parts], -1)


def _normal(a: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    centred = a - a.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + shift
