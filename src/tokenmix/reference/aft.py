"""The Attention Free Transformer (Zhai et al. 2021) as written.

The sum over t' is restricted to the keys a mask allows. The exponentials are taken after subtracting each row's own
maximum over the allowed keys, which leaves the paper's ratio unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(F, name) for name in ("tanh", "relu", "silu", "gelu", "softplus", "sigmoid")
} | {"identity": lambda q: q}


def aft_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | tuple[Tensor, Tensor],
    *,
    mask: Tensor | None = None,
    gate: str | None = "sigmoid",
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
    far = rows[:, :, None] - cols[:, None, :]
    near = far.abs() < window
    if w.ndim == 1:  # by distance: window - 1 first
        w = w[(window - 1 - far).clamp(0, len(w) - 1)]
    if outside == "none":
        mask = near.expand(q.shape[0], T, S) if mask is None else mask & near
    return aft_full(q, k, v, torch.where(near, w, 0.0), mask=mask, gate=gate)


def aft_simple(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, gate: str | None = "sigmoid") -> Tensor:
    """Compute Eq. 5: sigma(Q_t) * sum_t' softmax(K)_t' V_t'."""
    return aft_full(q, k, v, torch.zeros(q.shape[1], k.shape[1], dtype=k.dtype), mask=mask, gate=gate)


def aft_forget(
    q, k, v, g, *, heads: int | None = None, eps: float = 1e-6, mask: Tensor | None = None, gate: str | None = "sigmoid"
) -> Tensor:
    """Compute Eq. 2 with w_tt' the sum of the log-decays between t' and t, per feature, and an RMS norm per head.

    They are those of the tokens after the earlier of the two, up to the later one; masked tokens have none.
    """
    mask = torch.ones(q.shape[0], q.shape[1], q.shape[1], dtype=torch.bool) if mask is None else mask
    y = _by_feature(q, k, v, _decay_between(g, mask), mask)
    if heads is not None:
        y = _normalise_heads(y, heads, eps)
    return y if gate is None else _GATES[gate](q) * y


def aft_pairs(
    q, k, v, a, b=None, g=None, *, norm: bool = False, eps: float = 1e-6, mask: Tensor | None = None, gate="sigmoid"
) -> Tensor:
    """Compute Eq. 2 with w_tt' = log sum_r exp(a_tr + b_t'r + d_tt'r) per head, and an RMS norm per head."""
    heads, each = a.shape[2], q.shape[2] // a.shape[2]
    mask = torch.ones(q.shape[0], q.shape[1], q.shape[1], dtype=torch.bool) if mask is None else mask
    terms = a[:, :, None] + torch.zeros_like(a)[:, None]
    if b is not None:
        terms = terms + torch.where(mask.any(1)[:, :, None, None], b, 0.0)[:, None]
    if g is not None:
        terms = terms + _decay_between(g.flatten(2), mask).unflatten(-1, g.shape[2:])
    w = torch.logsumexp(terms, -1).repeat_interleave(each, -1)
    y = _by_feature(q, k, v, w, mask)
    if norm:
        y = _normalise_heads(y, heads, eps)
    return y if gate is None else _GATES[gate](q) * y


def aft_reach(
    q, k, v, a, b, g, *, norm: bool = False, eps: float = 1e-6, mask: Tensor | None = None, gate="sigmoid"
) -> Tensor:
    """Compute Eq. 2 with w_tt' = log sum_r exp(a_tr - lambda_r |t - t'|) per head; g holds -lambda per step."""
    return aft_pairs(q, k, v, a, b, g, norm=norm, eps=eps, mask=mask, gate=gate)


def _decay_between(g: Tensor, mask: Tensor) -> Tensor:
    """Sum the log-decays of the tokens after the earlier of t and t', up to the later one: (B, T, T, D)."""
    g = torch.where(mask.any(1)[..., None], g, 0.0)
    rows = []
    for t in range(g.shape[1]):
        before, after = g[:, 1 : t + 1].flip(1).cumsum(1).flip(1), g[:, t + 1 :].cumsum(1)
        rows.append(torch.cat([before, torch.zeros_like(g[:, :1]), after], 1))
    return torch.stack(rows, 1)


def _by_feature(q: Tensor, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    """Compute Eq. 2 without its gate, with weights w (B, T, T, D) of their own for each feature."""
    each = zip(*(a.split(1, -1) for a in (q, k, v)), w.unbind(-1), strict=True)
    return torch.cat([aft_full(*feature, mask=mask, gate=None) for feature in each], -1)


def _normalise_heads(y: Tensor, heads: int, eps: float) -> Tensor:
    return F.rms_norm(y.unflatten(-1, (heads, -1)), (y.shape[-1] // heads,), eps=eps).flatten(2)


def aft_conv(
    q,
    k,
    v,
    kernel,
    *,
    grid=None,
    prefix: int = 0,
    outside: str = "zero",
    filters: str = "exp",
    divide: bool = True,
    causal_taps: bool = False,
    positions=None,
    mask=None,
    gate: str | None = "sigmoid",
) -> Tensor:
    """Compute Eq. 6 as Eq. 2 with a relative bias, one bias and one key column per head.

    w_tt' = kernel[t' - t] inside the kernel and 0 outside. With signed filters or without division it is the equation
    of ``_mix_factored``, whose factors are exp(w) or, signed, 1 + w (w alone where nothing outside is attended).
    """
    heads, s, n = kernel.shape[0], kernel.shape[-1], kernel.ndim - 1
    B, T, D = q.shape
    grid = grid or (T - prefix,)
    positions = (torch.arange(T).expand(B, T) if positions is None else positions) - prefix
    centre = s - 1 if causal_taps else s // 2
    both = (positions >= 0)[:, :, None] & (positions >= 0)[:, None]
    cells = _cells(positions, grid)
    taps = cells[:, None] - cells[:, :, None] + centre
    reached = ((taps >= 0) & (taps < s)).all(-1)
    inside, near = both & reached, ~both | reached
    w = torch.where(inside, kernel[(slice(None), *taps.clamp(0, s - 1).unbind(-1))], 0.0).transpose(0, 1)
    local = inside[:, None].to(kernel.dtype)
    if outside == "none":
        mask = near if mask is None else mask & near
    c = D // heads
    if filters == "signed" or not divide:
        factors = torch.exp(w) if filters == "exp" else w + (1.0 if outside == "zero" else 1.0 - local)
        return _mix_factored(q, k, v, factors, mask, gate, divide)
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


def _mix_factored(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, mask: Tensor | None, gate: str | None, divide: bool
) -> Tensor:
    """Compute sigma(Q_t) * sum_t' c_tt' exp(K_t') V_t', divided by sum_t' exp(K_t') or not, with c per head."""
    B, T, D = q.shape
    keep = torch.ones(B, 1, T, T, dtype=torch.bool) if mask is None else mask[:, None]
    logits = k.transpose(1, 2)[:, :, None].expand(B, c.shape[1], T, T)
    if divide:
        weights = torch.softmax(torch.where(keep, logits, torch.finfo(k.dtype).min), -1)
    else:
        weights = torch.exp(torch.where(keep, logits, float("-inf")))
    weights = c * torch.where(keep, weights, 0.0)
    values = torch.where(keep.any(2)[..., None], v.unflatten(-1, (c.shape[1], -1)).transpose(1, 2), 0.0)
    y = (weights @ values).transpose(1, 2).flatten(2)
    return y if gate is None else _GATES[gate](q) * y


def _cells(positions: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return the grid cell of each flat index; in one dimension positions may exceed the number of tokens given."""
    if len(grid) == 1:
        return positions[..., None]
    return torch.stack(torch.unravel_index(positions.clamp_min(0), grid), -1)
