"""Gated linear recurrences as written: one token after the other, with one matrix per head."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    rule: str = "gated_delta",
    past: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute S_t = e^{g_t} S_{t-1} + k_t d_t^T and o_t = scale S_t^T q_t, heads of (B, T, H, d).

    d_t = beta_t (v_t - (e^{g_t} S_{t-1})^T k_t) under the delta rules, otherwise d_t = v_t. With ``mask`` (B, T, T),
    each query has a state of its own, over the tokens that it may attend. Returns o and S after the last token.
    """
    H, heads = max(q.shape[2], v.shape[2]), v.shape[2]
    q, k, v = (a.repeat_interleave(H // a.shape[2], 2) for a in (q, k, v))
    decay, beta = (None if a is None else a.repeat_interleave(H // a.shape[2], 2) for a in (decay, beta))
    B, T, dk = q.shape[0], q.shape[1], q.shape[3]
    queries = 1 if mask is None else T
    S = torch.zeros(B, 1, H, dk, v.shape[3], dtype=q.dtype) if past is None else past[:, None]
    S, outputs = S.repeat_interleave(H // S.shape[2], 2).expand(B, queries, -1, -1, -1), []
    for s in range(T):
        a = torch.ones((), dtype=q.dtype) if decay is None else torch.exp(decay[:, None, s])
        kept = S * (a if a.ndim == 0 else a[..., None, None] if a.ndim == 3 else a[..., None])
        read = torch.einsum("bhk,bthkv->bthv", k[:, s], kept) if "delta" in rule else 0.0
        write = torch.ones((), dtype=q.dtype) if beta is None else beta[:, None, s, :, None]
        after = kept + k[:, None, s, :, :, None] * (write * (v[:, None, s] - read))[..., None, :]
        S = after if mask is None else torch.where(mask[:, :, s, None, None, None], after, S)
        outputs.append(torch.einsum("bhk,bthkv->bthv", q[:, s], S)[:, 0])
    o = torch.stack(outputs, 1) if mask is None else torch.einsum("bthk,bthkv->bthv", q, S)
    return o * (dk**-0.5 if scale is None else scale), S[:, -1, :: H // heads]
