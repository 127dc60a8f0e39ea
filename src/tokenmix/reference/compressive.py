"""Compressive attention (Rae et al. 2020) by position: recent tokens as they are, older ones pooled in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from .transformer_xl import transformer_xl


def compressive(
    q,
    k,
    v,
    x,
    project,
    relative,
    content,
    place,
    squeeze,
    *,
    heads,
    memory,
    compressed,
    rate,
    pool,
    positions=None,
    starts=None,
    causal_taps=False,
    mask=None,
) -> Tensor:
    """Attend with relative positions over [compressed groups, tokens]; a group stands at its last position."""
    B, T = q.shape[:2]
    positions = (torch.arange(T).expand(B, T) if positions is None else positions) - (
        0 if starts is None else starts[:, None]
    )
    ok = torch.ones(B, T, T, dtype=torch.bool) if mask is None else mask
    valid, outputs = ok.diagonal(dim1=1, dim2=2), []
    for b in range(B):
        p, ids = positions[b], sorted({int(n) // rate for n in positions[b] if n >= 0})
        # groups start .. end - 1 are seen token by token
        start, end = (p - memory + 1) // rate, -(-(p + memory) // rate)
        near = ok[b] & (p // rate >= start[:, None]) & (p // rate < end[:, None]) & (p >= 0)
        g = torch.tensor(ids, dtype=torch.long)
        far = (g >= start[:, None] - compressed) & (g < start[:, None])
        far = far if causal_taps else far | (g >= end[:, None]) & (g < end[:, None] + compressed)
        far = far & torch.tensor([bool((valid[b] & (p // rate == n)).any()) for n in ids], dtype=torch.bool)
        pooled = (
            torch.stack([_pool(x[b], p, valid[b] & (p // rate == n), rate, pool, squeeze) for n in ids])
            if ids
            else x[b, :0]
        )
        keys, values = (
            torch.cat([pooled @ project[0].T + project[1], k[b]]),
            torch.cat([pooled @ project[2].T + project[3], v[b]]),
        )
        both = (torch.cat([far, near], 1) & (p >= 0)[:, None])[None]
        where = (p[None], torch.cat([g * rate + rate - 1, p])[None])
        outputs.append(
            transformer_xl(
                q[b : b + 1],
                keys[None],
                values[None],
                relative,
                content,
                place,
                heads=heads,
                positions=where,
                mask=both,
            )
        )
    return torch.cat(outputs) if outputs else torch.zeros_like(q)


def _pool(x: Tensor, p: Tensor, inside: Tensor, rate: int, pool: str, squeeze) -> Tensor:
    """Pool the tokens of a group into one vector.

    Their mean, their maximum, or a convolution that reads 0 where a token is missing.
    """
    if not bool(inside.any()):
        return torch.zeros_like(x[0])
    if pool in ("mean", "max"):
        return x[inside].mean(0) if pool == "mean" else x[inside].amax(0)
    weight, bias = squeeze
    return bias + sum(weight[..., int(p[t]) % rate] @ x[t] for t in range(len(x)) if inside[t])
