"""Hydra attention (Bolya et al. 2022) and kernel attention with any number of heads, as written, over the allowed keys.

A feature map is one name for queries and keys, or "query/key". Two names follow the literature: "softmax" normalises
keys over the tokens and queries over their features, "mean" is the identity with the sum divided by the number of
keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_MAPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "cosine": lambda x, eps: x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps),
    "elu": lambda x, eps: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "sigmoid": lambda x, eps: 1 / (1 + torch.exp(-x)),
    "tanh": lambda x, eps: torch.tanh(x),
    "softmax": lambda x, eps: torch.softmax(x, -1),
    "identity": lambda x, eps: x,
    "mean": lambda x, eps: x,
}


def hydra(
    q, k, v, *, feature: str = "cosine", normalise: bool = False, eps: float = 1e-6, mask: Tensor | None = None
) -> Tensor:
    """Compute phi(Q)_t * sum_s phi(K)_s * V_s, all products feature by feature."""
    of_q, of_k = (feature.split("/") * 2)[:2]
    rows = []
    for t in range(q.shape[1]):
        ok = torch.ones(k.shape[:2], dtype=torch.bool) if mask is None else mask[:, t]
        total = (_keys(k, ok, of_k, eps) * v).sum(1)
        if normalise or of_k == "mean":
            total = total / ok.sum(1, keepdim=True).clamp_min(1)
        rows.append(_MAPS[of_q](q[:, t], eps) * total)
    return torch.stack(rows, 1)


def multihead_linear(
    q,
    k,
    v,
    *,
    heads: int,
    feature: str = "cosine",
    normalise: bool = False,
    eps: float = 1e-6,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute phi(Q)_t (sum_s phi(K)_s^T V_s) in each head. phi sees the whole token; heads split its result."""
    of_q, of_k = (feature.split("/") * 2)[:2]
    rows = []
    for t in range(q.shape[1]):
        ok = torch.ones(k.shape[:2], dtype=torch.bool) if mask is None else mask[:, t]
        outer = torch.einsum("bshi,bshj->bhij", *(a.unflatten(-1, (heads, -1)) for a in (_keys(k, ok, of_k, eps), v)))
        if normalise or of_k == "mean":
            outer = outer / ok.sum(1).clamp_min(1)[:, None, None, None]
        asked = _MAPS[of_q](q[:, t], eps).unflatten(-1, (heads, -1))
        rows.append(torch.einsum("bhi,bhij->bhj", asked, outer).flatten(1))
    return torch.stack(rows, 1)


def _keys(k: Tensor, ok: Tensor, name: str, eps: float) -> Tensor:
    """Compute phi(K), 0 at masked keys; softmax runs over the others."""
    if name != "softmax":
        return torch.where(ok[..., None], _MAPS[name](k, eps), 0.0)
    weights = torch.softmax(torch.where(ok.any(1)[:, None, None], k.masked_fill(~ok[..., None], float("-inf")), 0.0), 1)
    return torch.where(ok[..., None], weights, 0.0)
