"""The lambda layer (Bello 2021): the context becomes one small linear map per query, by content and position."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import at_least_float32, exact
from .sums.nonfinite import hides
from .sums.softmax import FLOOR, MASKED_KEY, merge_heads, prefix_sums, ratio_of, split_heads64
from .sums.taps import centre_of, check_odd, grid_weights, pair_weights, silenced, slide, weighed


@exact
@hides("k", "v", asks="q")
def lambda_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    embedding: Tensor,
    *,
    heads: int,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_n = (lambda^c + lambda^p_n)^T q_n (Bello 2021, Eq. 1 and 2).

    lambda^c = sum_m softmax_m(K)_m v_m^T, lambda^p_n = sum_m E_{m - n} v_m^T.

    Args:
        q: (B, T, heads * w), w the key width; every head applies the same lambdas (multi-query lambdas).
        k: (B, T, w), one key for all heads; softmax is over tokens, feature by feature.
        v: (B, T, c), c = D / heads.
        embedding: E (s, w). Row j belongs to the key j - s // 2 positions after the query (causal: j - (s - 1));
            further keys have no position lambda. On a grid E (a, b, w), a and b odd: entry i, j belongs to the cell i -
            a // 2 lines and j - b // 2 columns away.
        grid: (H, W) of the tokens after the first ``prefix``, whose position lambdas are 0 to and from all.
        positions: (B, T); distances are measured in positions. On a grid, flat indices.

    Returns:
        (B, T, heads * c) in q's dtype. Content: time O(T w (c + D)), causal O(T w D). Position: no lambda^p is built;
        (q_n . E_{m - n}) weighs v_m instead, in O(T s (w heads + D)) for a window shorter than the sequence, else
        O(T^2 (w heads + D)).
    """
    _check(q, k, v, embedding, heads, causal, backend)
    if (embedding.ndim == 3) != (grid is not None) or (grid is not None and (causal or len(grid) != 2)):
        given = f"{tuple(embedding.shape)}, grid={grid}, causal={causal}"
        raise MixerError(
            f"lambda_layer: embeddings (a, b, w) need a grid (H, W) and causal=False, and vice versa; got {given}."
        )
    qh, vz = at_least_float32(q).unflatten(-1, (heads, -1)), silenced(v, key_mask)
    content = content_causal(k, v, key_mask) if causal else content_full(k, vz, key_mask)[:, None]
    y = qh @ content.to(qh.dtype)
    y = y + _positions(qh, vz[:, :, None], embedding.to(qh.dtype), grid, prefix, positions, causal)
    return y.flatten(2).to(q.dtype)


def _positions(
    q: Tensor, v: Tensor, E: Tensor, grid: tuple[int, ...] | None, prefix: int, positions: Tensor | None, causal: bool
) -> Tensor:
    """Apply lambda^p_n to q_n (B, T, heads, w): the values (B, T, 1, c) weighed by q_n . E."""
    T = q.shape[1]
    at = torch.arange(T, device=q.device).expand(q.shape[:2]) if positions is None else positions
    if grid is not None:
        return weighed(grid_weights(q @ E.flatten(0, 1).T, at, grid, prefix, (E.shape[0], E.shape[1])), v)
    if positions is None:
        E = _within(E, T, causal)
    taps, centre = q @ E.T, centre_of(E.shape[0], causal)
    if positions is None and E.shape[0] < T:
        return slide(taps, v, centre)
    return weighed(pair_weights(taps, at, at, centre, causal=causal), v)


def content_full(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Compute lambda^c (B, w, c) of all valid tokens in float64; 0 if there are none. v is 0 at masked tokens."""
    kd = k.double() if key_mask is None else torch.where(key_mask[..., None], k.double(), MASKED_KEY)
    if k.shape[1] == 0:
        return kd.new_zeros(k.shape[0], k.shape[-1], v.shape[-1])
    e = torch.exp(kd - kd.detach().amax(1, keepdim=True).clamp_min(FLOOR))
    den = e.sum(1)[..., None]
    return (e.transpose(1, 2) @ v.double()) / torch.where(den > 0, den, 1.0)


def content_causal(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Compute lambda^c_n (B, T, w, c) of tokens up to n, each under its own running maximum, in float64."""
    if k.shape[1] == 0:
        return k.new_zeros(k.shape[0], 0, k.shape[-1], v.shape[-1], dtype=torch.float64)
    ratio = merge_heads(ratio_of(prefix_sums(*split_heads64(k, per_key(v, k.shape[-1]), key_mask, 1))))
    return ratio.unflatten(-1, (-1, k.shape[-1])).transpose(-1, -2)


@exact
def per_key(v: Tensor, width: int) -> Tensor:
    """Repeat each value for each key feature, (B, T, c * w).

    This is the layout in which ``sums.softmax`` takes several values for one key.
    """
    return v[..., None].expand(*v.shape, width).flatten(-2)


def _within(E: Tensor, T: int, causal: bool) -> Tensor:
    """Keep only the rows of E that a distance within T tokens can reach."""
    beyond = max(0, E.shape[0] - T) if causal else max(0, E.shape[0] - (2 * T - 1)) // 2
    return E[beyond:] if causal else E[beyond : E.shape[0] - beyond]


def _check(q: Tensor, k: Tensor, v: Tensor, embedding: Tensor, heads: int, causal: bool, backend: Backend) -> None:
    choose("lambda_layer", backend, q)
    w = embedding.shape[-1]
    if q.shape[-1] != heads * w or k.shape[-1] != w:
        given = f"k {k.shape[-1]} and q {q.shape[-1]}"
        raise MixerError(f"lambda_layer: embeddings of width {w} need k {w} and q {heads} x {w} wide, got {given}.")
    if q.shape[:2] != v.shape[:2] or k.shape[:2] != v.shape[:2]:
        shapes = ", ".join(str(tuple(a.shape)) for a in (q, k, v))
        raise MixerError(f"lambda_layer: q, k and v must have the same length, got {shapes}.")
    for size in embedding.shape[:-1]:
        check_odd("lambda_layer", size, causal)
