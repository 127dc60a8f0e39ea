"""Softmax attention, the baseline: torch's fused kernel, or plain matrix products where those are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import MixerError
from ..kernels.backend import Backend, choose, is_intercepted
from ..kernels.precision import cast_alike, exact
from ..kernels.recompute import as_now
from ..types import Options
from .layout.checks import check_flags, check_scale
from .layout.heads import by_head
from .layout.masks import allowed, check_keys, zero_masked
from .sums.fused_attention import fused_attention, plain_attention
from .sums.nonfinite import add_nan_mask, clean, nothing_to_hide, over_keys

ROWS = 512  # queries whose biases are held at once
Bias = Tensor | Callable[[int, int], Tensor]
"""Log-weights (1 or B, 1 or H, T, S), or a function that returns those of the queries start .. stop - 1."""


@exact
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Bias | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s softmax_s(scale q_t . k_s + w_ts) v_s in each head (Vaswani et al. 2017, Eq. 1).

    Layout (B, T, heads * width).

    Args:
        q: (B, T, heads * e).
        k, v: (B, S, kv_heads * e); head i of the queries reads key head i // (heads / kv_heads).
        w: log-weights (1 or B, 1 or heads, T, S), a position bias for instance; None: 0. -inf forbids a pair; a query
            whose w is -inf throughout gives NaN, unlike one that masks leave nothing. Given as a function, w(start,
            stop) returns those of the queries start .. stop - 1, none of them NaN; it is called for 512 queries at a
            time, and again in the backward pass, so that T x S numbers for all heads are never held.
        scale: default 1 / sqrt(e).

    A query with nothing to attend gives exactly 0. Second derivatives are those of the eager form; on CUDA torch's
    fused kernel has none, so they need ``backend="eager"``.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    check_flags("attention", causal=causal)
    check_scale("attention", scale)
    for name, n in (("heads", heads), ("kv_heads", kv_heads)):
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise MixerError(f"attention: {name} must be an integer >= 1, got {n!r}.")
    if q.shape[-1] % heads or heads % kv_heads or k.shape[-1] * heads != q.shape[-1] * kv_heads:
        widths = f"q of width {q.shape[-1]} and k of width {k.shape[-1]}"
        raise MixerError(f"attention: heads={heads}, kv_heads={kv_heads} do not divide {widths}.")
    check_keys(key_mask, *k.shape[:2])
    kh, vh = by_head(zero_masked(k, key_mask), kv_heads), by_head(zero_masked(v, key_mask), kv_heads)
    options: Options = {"scale": scale, "causal": causal, "key_mask": key_mask, "attn_mask": attn_mask}
    return attention_by_head(by_head(q, heads), kh, vh, w, **options, backend=backend)


def finite_attention(
    q: Tensor, k: Tensor, v: Tensor, *, heads: int, key_mask: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """Compute bidirectional ``attention`` for forms that already mark NaN, so that nothing is hidden twice."""
    qh, kh, vh = (by_head(a, heads) for a in (q, k, v))
    return _attend_finite(qh, kh, vh, scale=None, causal=False, key_mask=key_mask, attn_mask=None, backend=backend)


@exact
def attention_by_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Bias | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the same for q (B, H, T, e), k and v (B, G, S, e), which hold 0 where ``key_mask`` is False.

    Returns (B, T, H * e).
    """
    q, k, v = cast_alike(q, k, v)
    if isinstance(w, Tensor):
        _check_bias(w, q, k)
    given: Options = {
        "w": w,
        "scale": scale,
        "causal": causal,
        "key_mask": key_mask,
        "attn_mask": attn_mask,
        "backend": backend,
    }
    # each query attends every valid key
    all_meet = attn_mask is None and (q.shape[2] == 1 or not causal) and not torch.is_grad_enabled()
    weights = (w,) if isinstance(w, Tensor) else ()
    if q.is_cuda or all_meet or nothing_to_hide(q, k, v, *weights):  # on CUDA hiding costs more than fused attention
        return _attend_finite(q, k, v, **given)
    own = _mark(q)
    if isinstance(w, Tensor):
        unknown = ~(w.detach() < float("inf"))  # -inf forbids a pair
        given["w"] = torch.where(unknown, 0.0, w)
        (B, _, T, _), S = q.shape, k.shape[2]
        ok = allowed(B, T, S, causal=causal, key_mask=key_mask, attn_mask=attn_mask, device=q.device)
        own = own.masked_fill((unknown.any(1) & ok).any(-1, keepdim=True), float("nan"))
    y = _attend_finite(clean(q), clean(k), clean(v), **given)
    met = over_keys(_mark(k) + _mark(v), q.shape[2], causal=causal, attn_mask=attn_mask)
    return add_nan_mask(y, met + own)


def _mark(a: Tensor) -> Tensor:
    """Return the marks (B, T, 1) of tokens by head (B, H, T, e), for all heads at once."""
    return (a.detach() * 0.0).sum((1, 3))[..., None]


def _check_bias(w: Tensor, q: Tensor, k: Tensor) -> None:
    (B, H, T, _), S = q.shape, k.shape[2]
    if w.ndim != 4 or w.shape[0] not in (1, B) or w.shape[1] not in (1, H) or w.shape[2:] != (T, S):
        raise MixerError(f"attention: expects w (1 or {B}, 1 or {H}, {T}, {S}), got {tuple(w.shape)}.")


def _in_rows(q: Tensor, k: Tensor, v: Tensor, w: Callable[[int, int], Tensor], **given: Any) -> Tensor:
    """Compute ``_attend_finite`` for some queries at a time; of causal rows only the keys that they see."""
    (_, _, T, _), S = q.shape, k.shape[2]
    key_mask, attn_mask, causal = given.pop("key_mask"), given.pop("attn_mask"), given["causal"]

    def rows(start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stop, seen = start + q.shape[2], k.shape[2]
        pairs = None if attn_mask is None else attn_mask[..., start:stop, :seen]
        keys = None if key_mask is None else key_mask[:, :seen]
        bias = w(start, stop)[..., :seen]
        return _attend_finite(q, k, v, w=bias, key_mask=keys, attn_mask=pairs, **given)

    again = torch.is_grad_enabled() and not is_intercepted()
    outputs, later = [], as_now(rows)
    for start in range(0, T, ROWS):
        seen = min(start + ROWS, T) + S - T if causal else S
        part = q[:, :, start : start + ROWS], k[:, :, :seen], v[:, :, :seen]
        outputs.append(checkpoint(later, start, *part, use_reentrant=False) if again else rows(start, *part))
    return torch.cat(outputs, 1)


def _attend_finite(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    w: Bias | None = None,
    scale: float | None,
    causal: bool,
    key_mask: Tensor | None,
    attn_mask: Tensor | None,
    backend: Backend,
) -> Tensor:
    """Compute the same when everything is finite, or attended by all."""
    if w is not None and not isinstance(w, Tensor):
        options: Options = {"scale": scale, "causal": causal, "key_mask": key_mask, "attn_mask": attn_mask}
        return _in_rows(q, k, v, w, **options, backend=backend)
    (B, _, T, _), S = q.shape, k.shape[2]
    fused = choose("attention", backend, q, on=("fused",)) == "fused"
    if w is not None and (torch.is_grad_enabled() or q.dtype.itemsize < 4):
        fused = False  # torch's kernels give no gradient to a bias, and would round it to half precision
    masked = causal or key_mask is not None or attn_mask is not None
    if fused and w is None and (not masked or causal and key_mask is None and attn_mask is None and T == S):
        return fused_attention(q, k, v, causal=causal, scale=scale).transpose(1, 2).flatten(2)
    if not masked:
        y = fused_attention(q, k, v, mask=w, scale=scale) if fused else plain_attention(q, k, v, None, scale, w)
        return y.transpose(1, 2).flatten(2).to(q.dtype)
    rows = T if causal or attn_mask is not None else 1  # one row of a mask of keys serves all queries
    alike = key_mask is None and attn_mask is None  # one mask serves the batch, and leaves each query a key if T <= S
    ok = allowed(1 if alike else B, rows, S, causal=causal, key_mask=key_mask, attn_mask=attn_mask, device=q.device)
    some = None if alike and T <= S else ok.any(-1, keepdim=True)
    safe = (ok if some is None else ok | ~some)[:, None]
    if fused:
        mask = safe if w is None else w.to(q.dtype).masked_fill(~safe, float("-inf"))
        y = fused_attention(q, k, v, mask=mask, scale=scale)
    else:
        y = plain_attention(q, k, v, safe, scale, w)
    y = y.transpose(1, 2).flatten(2)
    return (y if some is None else torch.where(some, y, 0.0)).to(q.dtype)
