"""Offset attention of PCT (Guo et al. 2020): what a point is beyond the average that it attends."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import alike, at_least_float32, exact
from .layout.checks import check_key_mask, check_scale
from .layout.masks import zero_masked
from .sums.nonfinite import hides


@exact
@hides("q", "k", "v", "x")
def pct_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    *,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = x_t - sum_s a_ts v_s, the offset of each token from what it attends (PCT, Eqs. 7 to 9).

    b_ts = exp(scale q_t . k_s) / sum_u exp(scale q_u . k_s) is a softmax over the queries, and a_ts = b_ts / sum_r b_tr
    has l1 norm 1 over the keys. Both are computed as one softmax over the keys, of scale q_t . k_s - log sum_u
    exp(scale q_u . k_s), so that a query whose b all underflow still has weights.

    Args:
        q, k: (B, T, d).
        v, x: (B, T, D).
        scale: factor of the logits; the paper has none.
        key_mask: (B, T) bool, False = neither a key nor a query in the softmax of others.

    Returns:
        (B, T, D) in v's dtype; 0 in rows without a valid token. Time O(T^2 (d + D)).

    Raises:
        MixerError: the shapes do not fit, or ``scale`` is not a positive number.
    """
    choose("pct_attention", backend, q)
    check_scale("pct_attention", scale)
    if q.ndim != 3 or q.shape != k.shape or v.shape != x.shape or v.shape[:2] != q.shape[:2]:
        shapes = ", ".join(str(tuple(a.shape)) for a in (q, k, v, x))
        raise MixerError(f"pct_attention: expects q, k (B, T, d) and v, x (B, T, D), got {shapes}.")
    check_key_mask("pct_attention", key_mask, k)
    kind = v.dtype
    q, k, v, x = alike(*map(at_least_float32, (q, zero_masked(k, key_mask), zero_masked(v, key_mask), x)))
    if q.shape[1] == 0:
        return v.to(kind)
    logits = (scale * q) @ k.mT
    if key_mask is None:
        return (x - offsets(logits, logits).softmax(-1) @ v).to(kind)
    some = key_mask.any(1)[:, None, None]
    asked = logits.masked_fill(~(key_mask[:, :, None] | ~some), float("-inf"))
    weights = offsets(logits, asked).masked_fill(~(key_mask[:, None] | ~some), float("-inf")).softmax(-1)
    return torch.where(some, x - weights @ v, 0.0).to(kind)


def offsets(logits: Tensor, asked: Tensor) -> Tensor:
    """Return the logarithm of the softmax over queries: logits (B, T, S) less the log-sum-exp of ``asked`` over T."""
    return logits - torch.logsumexp(asked, 1, keepdim=True)
