"""Softmax attention in a sliding window.

Layout (B, T, heads * e). Self-mixing at default positions runs by blocks (``layout.blocks``) and never makes a T x T
tensor; with explicit ``positions``, ``attn_mask``, or a number of keys other than that of queries, a masked dense form
runs. A query with nothing to attend gives exactly 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend
from ..kernels.precision import at_least_float32, exact
from .layout.blocks import (
    FLOOR,
    ByDistance,
    PartialSums,
    Ready,
    band,
    check,
    merge_heads,
    own_positions,
    pairs_of,
    prepare_blocks,
    products,
    ratio,
    sums_of,
)
from .layout.checks import check_key_mask, check_name
from .layout.positions import Positions
from .sums.window import LOCAL_OUTSIDES, LocalOutside


@exact
def local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    *,
    window: int,
    heads: int,
    outside: LocalOutside = "none",
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    positions: Positions | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s exp(l_ts) v_s / sum_s exp(l_ts), l_ts = q_t . k_s / sqrt(e) + w_ts where |t - s| < window.

    Args:
        q: (B, T, D); k, v: (B, S, D).
        w: taps, log-weights by distance (heads, n): tap j is that of t - s = window - 1 - j, with n = window when
            causal and 2 window - 1 otherwise. None: 0.
        window: a row sees 2 window - 1 keys, window when causal.
        outside: "none": nothing outside the window is attended; "pool": every key counts there with l_ts = 0, as in
            AFT-local (bias, not mask).
        positions: (B, T) if they are not the indices, or a pair, of queries and of keys: distances are then those of
            positions.

    Time and memory O(T window D) by blocks; with ``positions``, ``attn_mask`` or S != T, O(T S D).
    """
    check("local", q, k, v, heads, backend, window=window)
    check_key_mask("local", key_mask, k)
    check_name("local", "outside", outside, LOCAL_OUTSIDES)
    _check_taps(w, window, heads, causal)
    if 0 in (q.shape[1], k.shape[1]):
        return torch.zeros_like(q)
    r = prepare_blocks(q, k, v, heads, key_mask, _taps(w, window))
    if positions is not None or attn_mask is not None or q.shape[1] != k.shape[1]:
        positions = own_positions(q, k, None) if positions is None else positions
        rows, cols, ok = pairs_of(positions, q, k, causal=causal, key_mask=key_mask, attn_mask=attn_mask)
        return merge_heads(ratio(_near_part(r, rows - cols, window, ok, outside)), q)
    parts = [band(*r, back=window - 1, ahead=0 if causal else window - 1)]
    if outside == "pool":
        parts += (
            [_pool_far_keys(r, window)]
            if causal
            else [_pool_far_keys(r, window), _reverse_part(_pool_far_keys(_reverse_time(r), window))]
        )
    return merge_heads(ratio(*parts), q)


@exact
def local_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    positions: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    *,
    window: int,
    heads: int,
    outside: LocalOutside,
    key_mask: Tensor,
) -> Tensor:
    """Compute ``local`` for the last T of S tokens after older ones.

    The values of the older tokens sum to far[0] (B, D) over far[1] (B,) tokens, all of them outside every window.
    """
    rows, cols, ok = pairs_of(positions, q, k, causal=True, key_mask=key_mask, attn_mask=None)
    near = _near_part(prepare_blocks(q, k, v, heads, key_mask, _taps(w, window)), rows - cols, window, ok, outside)
    if outside == "none":
        return merge_heads(ratio(near), q)
    num, den = (
        F.pad(far[0].unflatten(-1, (heads, -1))[:, :, None].to(near.num.dtype), (0, 1)),
        far[1][:, None, None, None].to(near.den.dtype),
    )
    return merge_heads(ratio(near, PartialSums(_zero_logit(den), num, den)), q)


def _near_part(r: Ready, far: Tensor, window: int, ok: Tensor, outside: LocalOutside) -> PartialSums:
    """Compute the dense form for distances t - s: outside the window either no pair or the logit 0."""
    near = far.abs() < window
    logits = products(r.q, r.k)
    logits = logits if r.added is None else logits + r.added(far).transpose(0, 1).to(logits.dtype)
    if outside == "none":
        return sums_of(logits, (ok & near)[:, None], r.q, r.v)
    return sums_of(torch.where(near[:, None], logits, 0.0), ok[:, None], r.q, r.v)


def _taps(w: Tensor | None, window: int) -> ByDistance | None:
    """Return the function that looks the taps (heads, n) of distances t - s up; beyond the window it gives any."""
    if w is None:
        return None
    taps = at_least_float32(w)

    def distance_bias(far: Tensor) -> Tensor:
        which = (window - 1 - far).clamp(0, taps.shape[1] - 1)
        return taps.index_select(1, which.flatten()).unflatten(1, which.shape)

    return distance_bias


def _check_taps(w: Tensor | None, window: int, heads: int, causal: bool) -> None:
    fits = (heads, window if causal else 2 * window - 1)
    if w is not None and tuple(w.shape) != fits:
        raise MixerError(f"local: with window={window} and causal={causal}, w must be {fits}, got {tuple(w.shape)}.")


def _pool_far_keys(r: Ready, window: int) -> PartialSums:
    """Pool the keys ``window`` or more before each query, each with logit 0.

    Uses float64 running sums, only of what lies outside the window.
    """
    num = F.pad(r.v.double().cumsum(-2), (0, 0, window, 0))[..., : r.v.shape[-2], :]
    ones = torch.ones_like(r.v[:, :1, :, 0]) if r.valid is None else r.valid
    den = F.pad(ones.double().cumsum(-1), (window, 0))[..., : r.v.shape[-2], None].to(r.v.dtype)
    return PartialSums(_zero_logit(den), num.to(r.v.dtype), den)


def _zero_logit(count: Tensor) -> Tensor:
    """Return the largest logit of a pool: 0, or FLOOR if the pool is empty."""
    return torch.where(count > 0, 0.0, FLOOR).to(count.dtype)


def _reverse_time(r: Ready) -> Ready:
    return Ready(r.q, r.k, r.v.flip(-2), None if r.valid is None else r.valid.flip(-1))


def _reverse_part(p: PartialSums) -> PartialSums:
    return PartialSums(*(a.flip(-2) for a in p))
