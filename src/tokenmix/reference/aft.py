"""The Attention Free Transformer (Zhai et al. 2021) as written.

The sum over t' is restricted to the keys a mask allows. The exponentials are taken after subtracting each row's own
maximum over the allowed keys, which leaves the paper's ratio unchanged.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_GATES: dict[str, Any] = {
    name: getattr(F, name) for name in ("tanh", "relu", "silu", "gelu", "softplus", "sigmoid")
} | {"identity": lambda q: q}


def aft_full(
    q: Tensor, k: Tensor, v: Tensor, w: Any, *, mask: Tensor | None = None, gate: str | None = "sigmoid"
) -> Tensor:
    """Compute Eq. 2: sigma(Q_t) * sum_t' exp(K_t' + w_tt') V_t' / sum_t' exp(K_t' + w_tt')."""
    if isinstance(w, tuple):
        w = w[0] @ w[1].transpose(-1, -2)
    logits = (k[:, None] + w[..., None]).expand(*q.shape[:2], *k.shape[1:])  # (B, T, S, D)
    if mask is None:
        mask = torch.ones(logits.shape[:3], dtype=torch.bool)
    some = mask.any(-1)[..., None]
    logits = logits.masked_fill(~mask[..., None], float("-inf"))
    logits = torch.where(some[..., None], logits, 0.0)
    weights = torch.softmax(logits, 2)
    y = torch.where(some, (weights * v[:, None]).sum(2), 0.0)
    return y if gate is None else _GATES[gate](q) * y


def aft_local(
    q, k, v, w, *, window: int, outside: str = "zero", positions=None, mask=None, gate: str | None = "sigmoid"
) -> Tensor:
    """Compute Eq. 4: w_tt' where |t - t'| < s, otherwise 0."""
    if isinstance(w, tuple):
        w = w[0] @ w[1].transpose(-1, -2)
    T, S = q.shape[1], k.shape[1]
    positions = (torch.arange(T)[None], torch.arange(S)[None]) if positions is None else positions
    rows, cols = positions if isinstance(positions, tuple) else (positions, positions)
    near = (rows[:, :, None] - cols[:, None, :]).abs() < window
    if outside == "none":
        mask = near.expand(q.shape[0], T, S) if mask is None else mask & near
    return aft_full(q, k, v, torch.where(near, w, 0.0), mask=mask, gate=gate)


def aft_simple(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, gate: str | None = "sigmoid") -> Tensor:
    """Compute Eq. 5: sigma(Q_t) * sum_t' softmax(K)_t' V_t'."""
    return aft_full(q, k, v, torch.zeros(q.shape[1], k.shape[1], dtype=k.dtype), mask=mask, gate=gate)


def aft_conv(
    q,
    k,
    v,
    kernel,
    *,
    grid=None,
    prefix: int = 0,
    outside: str = "zero",
    causal_taps: bool = False,
    positions=None,
    mask=None,
    gate: str | None = "sigmoid",
) -> Tensor:
    """Compute Eq. 6 as Eq. 2 with a relative bias, one bias and one key column per head.

    w_tt' = kernel[t' - t] inside the kernel and 0 outside.
    """
    heads, s, n = kernel.shape[0], kernel.shape[-1], kernel.ndim - 1
    B, T, D = q.shape
    grid = grid or (T - prefix,)
    positions = (torch.arange(T).expand(B, T) if positions is None else positions) - prefix
    cells = list(product(*(range(size) for size in grid)))
    centre = s - 1 if causal_taps else s // 2
    w, near = torch.zeros(B, heads, T, T, dtype=kernel.dtype), torch.ones(B, T, T, dtype=torch.bool)
    for b, t, u in product(range(B), range(T), range(T)):
        if positions[b, t] >= 0 and positions[b, u] >= 0:
            tap = [
                there - here + centre
                for here, there in zip(_cell(cells, positions[b, t]), _cell(cells, positions[b, u]), strict=True)
            ]
            near[b, t, u] = all(0 <= j < s for j in tap)
            if near[b, t, u]:
                w[b, :, t, u] = kernel[(slice(None), *tap)]
    if outside == "none":
        mask = near if mask is None else mask & near
    c = D // heads
    parts = [
        aft_full(
            q[..., h * c : (h + 1) * c],
            k[..., h : h + 1].expand(B, T, c),
            v[..., h * c : (h + 1) * c],
            w[:, h],
            mask=mask,
            gate=gate,
        )
        for h in range(heads)
    ]
    assert n == len(grid)
    return torch.cat(parts, -1)


def _cell(cells: list[tuple[int, ...]], position: Tensor) -> tuple[int, ...]:
    """Return the grid cell of a flat index; in one dimension positions may exceed the number of tokens given."""
    return cells[int(position)] if len(cells[0]) > 1 else (int(position),)
