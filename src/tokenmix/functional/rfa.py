"""Random feature attention (Peng et al. 2021): trigonometric random features, with an optional recency gate.

Queries and keys have unit length. The gated recurrence S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t is a weighted sum:
after t, key s weighs (1 - g_s) g_{s+1} ... g_t. The product up to t is common to all keys and cancels, so key s has the
log-weight c_s = log(1 - g_s) - (log g_1 + ... + log g_s), and prefix sums under a running maximum of c compute the
recurrence without a loop over time. Without a gate c = 0.

Shapes: features fq (B, H, T, M'), fk (B, H, S, M' + 1) whose last one is 1 and sums the weights themselves,
c (B, H, S, 1), v1 (B, H, S, e + 1). Everything is float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact
from .layout.checks import check_eps, check_name, check_qkv
from .layout.masks import zero_masked
from .sums import features as sums
from .sums.nonfinite import propagate_nonfinite, propagate_nonfinite_chunk
from .sums.softmax import FLOOR, MASKED_KEY, Sums, running_max

RFA_FEATURES = ("gaussian", "arccos")
SHORTEST = 1e-6  # queries and keys shorter than this are not scaled to unit length
Past = sums.Past  # m (B, H, 1), acc (B, H, e + 1, M' + 1)


def check_feature(who: str, feature: str, eps: float) -> None:
    """Refuse random features that do not exist, and denominators without a lower bound."""
    check_name(who, "feature", feature, RFA_FEATURES)
    check_eps(who, eps, zero=False)


@exact
def rfa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    sigma: Tensor,
    gate: Tensor | None = None,
    *,
    heads: int,
    feature: str = "gaussian",
    eps: float = 0.01,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s c_s (phi(q_t) . phi(k_s)) v_s / sum_s c_s phi(q_t) . phi(k_s) in each head.

    q and k have unit length (Section 3.1).
    ``gaussian``: phi(x) = [sin(w_i . x), cos(w_i . x)]_i / sqrt(M), w_i = sigma * projection_i, so that
        E[phi(q) . phi(k)] = exp(-|sigma (q - k)|^2 / 2).
    ``arccos``: phi(x)_i = max(w_i . x, 0) sqrt(2 / M).
    c_s = 1, or with a gate the weight given in the module docstring (RFA-Gate).

    Args:
        q: (B, T, H e). k, v: (B, S, H e).
        projection: (H, M, e). sigma: (H, e).
        gate: logits (B, S, H) of g_s; a masked key passes the sums on unchanged.
        eps: the least mean weight of a denominator. Estimates of a weight may be negative; a denominator below
            eps sum_s c_s is raised to that.

    Returns:
        (B, T, H e) in q's dtype, exactly 0 where nothing may be attended. Time O(T M D).
    """
    choose("rfa", backend, q)
    check_feature("rfa", feature, eps)
    _check(q, k, v, projection, sigma, gate, heads, causal, key_mask)
    if q.shape[1] == 0 or k.shape[1] == 0:
        return torch.zeros_like(q)

    def form(q: Tensor, k: Tensor, v: Tensor, *gate: Tensor) -> Tensor:
        fq, new = (
            features(q, projection, sigma, feature),
            keys(k, v, projection, sigma, gate[0] if gate else None, feature, key_mask),
        )
        y = causal_read(fq, *new[:3], eps)[0] if causal else read(fq, over_keys(*new[:3]), eps)
        return sums.joined_heads(y, q)

    return propagate_nonfinite(form, q, k, v, *(() if gate is None else (gate,)), causal=causal, key_mask=key_mask)


def rfa_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past,
    projection: Tensor,
    sigma: Tensor,
    gate: Tensor | None,
    *,
    feature: str,
    eps: float,
    key_mask: Tensor | None,
) -> tuple[Tensor, Past]:
    """Mix new tokens (B, L, H e) over the sums of all earlier keys and each other: outputs, and the sums after them."""

    def form(q: Tensor, k: Tensor, v: Tensor, *gate: Tensor) -> tuple[Tensor, Past]:
        fq, (fk, v1, c, kept) = (
            features(q, projection, sigma, feature),
            keys(k, v, projection, sigma, gate[0] if gate else None, feature, key_mask),
        )
        y, (m, acc) = causal_read(fq, fk, v1, c, eps, past)
        return sums.joined_heads(y, q), (m + kept, acc)  # the next chunk sums its gates from 0

    return propagate_nonfinite_chunk(form, q, k, v, *(() if gate is None else (gate,)), key_mask=key_mask)


def features(x: Tensor, projection: Tensor, sigma: Tensor, feature: str) -> Tensor:
    """Compute phi(x), (B, H, T, M')."""
    x = sums.wide_by_head(x, projection.shape[0])
    x = x / x.square().sum(-1, keepdim=True).clamp_min(SHORTEST**2).sqrt()
    z = (x * sigma.double()[:, None]) @ projection.double().transpose(-1, -2)
    if feature == "arccos":
        return z.relu() * (2.0 / z.shape[-1]) ** 0.5
    return torch.cat([z.sin(), z.cos()], -1) * z.shape[-1] ** -0.5


def keys(
    k: Tensor, v: Tensor, projection: Tensor, sigma: Tensor, gate: Tensor | None, feature: str, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return fk, v1, the log-weights c, and the sum (B, H, 1) of log g over the valid keys."""
    fk = F.pad(features(zero_masked(k, key_mask), projection, sigma, feature), (0, 1), value=1.0)
    v1 = sums.with_ones(zero_masked(v, key_mask), projection.shape[0])
    if gate is None:
        c = torch.zeros_like(fk[..., :1])
        return fk, v1, sums.masked_features(c, key_mask), c[:, :, 0]
    g = sums.wide_by_head(zero_masked(gate, key_mask), projection.shape[0])
    kept = F.logsigmoid(g) if key_mask is None else torch.where(key_mask[:, None, :, None], F.logsigmoid(g), 0.0)
    return fk, v1, sums.masked_features(F.logsigmoid(-g) - kept.cumsum(-2), key_mask), kept.sum(-2)


def over_keys(fk: Tensor, v1: Tensor, c: Tensor) -> Sums:
    """Sum over all keys: m (..., 1, 1), acc (..., 1, e + 1, M' + 1)."""
    m = c.detach().amax(-2, keepdim=True).clamp_min(FLOOR)
    acc = (v1 * torch.exp(c - m)).transpose(-1, -2) @ fk
    return Sums(m, torch.zeros_like(m), acc[..., None, :, :])


def read(fq: Tensor, s: Sums, eps: float) -> Tensor:
    """Read the same sums with every query."""
    acc = s.acc.squeeze(-3)
    return safe_ratio(fq @ acc[..., :-1].transpose(-1, -2), acc[..., -1:, -1:], eps)


def safe_ratio(total: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide numerator by denominator of (..., T, e + 1); 0 where the weight is 0.

    The denominator is at least eps times the weight of all keys (..., T or 1, 1).
    """
    den = torch.maximum(total[..., -1:], eps * weight)
    return total[..., :-1] / torch.where(weight > 0, den, 1.0)


def causal_read(
    fq: Tensor, fk: Tensor, v1: Tensor, c: Tensor, eps: float, past: Past | None = None
) -> tuple[Tensor, Past]:
    """Read ``past`` and keys 0..t with query t, and return the sums after the last key.

    This works block by block, as in ``sums.features``.
    """
    T = fq.shape[-2]
    (qb, kb, vb), cb = sums.in_blocks((fq, fk, v1), 0.0), sums.in_blocks((c,), MASKED_KEY)[0]
    before, last = sums.prefix_of_blocks(
        cb, lambda top, rise: (vb * torch.exp(cb - top + rise)).transpose(-1, -2) @ kb, past
    )
    return _leaf(qb, kb, vb, cb, before, eps).flatten(-3, -2)[..., :T, :], last


def _leaf(fq: Tensor, fk: Tensor, v1: Tensor, c: Tensor, before: Sums, eps: float) -> Tensor:
    """Read the sums before each block and the block's own keys up to the query: (..., n, size, e)."""
    top = torch.maximum(running_max(c.detach()), before.m).clamp_min(FLOOR)
    unseen = torch.ones(c.shape[-2], c.shape[-2], dtype=torch.bool, device=c.device).triu(1)
    weight = torch.exp((c.transpose(-1, -2) - top).masked_fill(unseen, float("-inf")))
    near = (weight * (fq @ fk[..., :-1].transpose(-1, -2))) @ v1
    acc, scale = before.acc.squeeze(-3), torch.exp(before.m - top + before.lift)
    far = scale * (fq @ acc[..., :-1].transpose(-1, -2))
    return safe_ratio(near + far, weight.sum(-1, keepdim=True) + scale * acc[..., -1:, -1:], eps)


def _check(q, k, v, projection, sigma, gate, heads, causal, key_mask) -> None:
    check_qkv("rfa", q, k, v, heads, causal, key_mask)
    e = q.shape[2] // heads
    if projection.ndim != 3 or projection.shape[0] != heads or projection.shape[2] != e or sigma.shape != (heads, e):
        shapes = f"{tuple(projection.shape)} and {tuple(sigma.shape)}"
        raise MixerError(f"rfa: expects projection ({heads}, M, {e}) and sigma ({heads}, {e}), got {shapes}.")
    if gate is not None and gate.shape != (*k.shape[:2], heads):
        raise MixerError(f"rfa: expects a gate of shape {(*k.shape[:2], heads)}, got {tuple(gate.shape)}.")
