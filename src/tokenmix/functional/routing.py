"""Routing attention: tokens meet in clusters of an online spherical k-means (Roy et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact, sum_dtype
from .layout.buckets import attend_dense, attend_sorted, coded, in_order, ratio, sort_by_bucket, sums_of
from .layout.heads import by_head
from .layout.masks import valid_mask
from .sums.nonfinite import hides, honest

EPS = 1e-6  # added to the variance; a token of equal features is normalised to 0
TINY = 1e-12  # added to the squared length of a centroid


def on_sphere(q: Tensor, heads: int) -> Tensor:
    """Apply LayerNorm without affine in each head, the paper's proxy for the unit sphere, in float64.

    (B, T, D) -> (B, heads, T, e), of length sqrt(e).
    """
    x = by_head(q.double(), heads)
    x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def closeness(x: Tensor, centroids: Tensor) -> Tensor:
    """Compute x_t . mu_c / |mu_c|, detached: x (B, heads, T, e), centroids (heads, k, e) -> (B, heads, k, T)."""
    mu = centroids.detach().double()
    return (mu * (mu.square().sum(-1, keepdim=True) + TINY).rsqrt()) @ x.detach().transpose(-1, -2)


def nearest_clusters(q: Tensor, centroids: Tensor, *, heads: int) -> Tensor:
    """Return the cluster of each token, (B, heads, T)."""
    return closeness(on_sphere(q, heads), centroids).argmax(2)


def top_tokens(q: Tensor, centroids: Tensor, valid: Tensor, *, heads: int, window: int) -> Tensor:
    """Return the ``window`` valid tokens closest to each centroid, (B, heads, k, min(window, T)).

    Of two equally close tokens the earlier comes first; masked tokens come last.
    """
    close = torch.where(valid[:, None, None], closeness(on_sphere(q, heads), centroids), float("-inf"))
    if torch.compiler.is_exporting():  # ONNX has no stable sort; its TopK also takes the earlier of two equal values
        return close.topk(min(window, close.shape[-1]), -1).indices
    return close.sort(dim=-1, descending=True, stable=True).indices[..., :window]


@exact
@hides("q", "v")
def routing(
    q: Tensor,
    v: Tensor,
    centroids: Tensor,
    *,
    heads: int,
    window: int,
    paper_form: bool = False,
    clusters: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s softmax_s(x_t . x_s / sqrt(e)) v_s over tokens routed like t.

    x is LayerNorm(q) in each head, queries and keys at once.
    ``causal``: a token belongs to the centroid nearest by angle, and attends itself and the valid tokens of its cluster
        before it, the last ``window`` in all.
    Otherwise, and with ``paper_form`` (Alg. 1): each centroid takes the ``window`` valid tokens nearest to it, and
        these attend each other, in order if ``causal``. A token that several take gets the mean of its outputs, one
        that none takes 0. This form looks ahead even if ``causal``: whether a centroid takes a token depends on later
        ones.

    Args:
        q: (B, T, D).
        v: (B, T, D).
        centroids: (heads, k, e).
        clusters: ``nearest_clusters`` (B, heads, T), or ``top_tokens`` (B, heads, k, w), to use instead of deciding.

    Masked queries, and those with nothing to attend, give 0.
    """
    choose("routing", backend, q)
    if q.shape[-1] % heads or centroids.shape[::2] != (heads, q.shape[-1] // heads):
        shape = tuple(centroids.shape)
        raise MixerError(f"routing: heads={heads} and centroids {shape} do not fit q of width {q.shape[-1]}.")
    valid = valid_mask(q, key_mask)
    xh, kh, vh = _prepared(q, v, valid, heads)
    if paper_form or not causal:
        chosen = top_tokens(q, centroids, valid, heads=heads, window=window) if clusters is None else clusters
        y = _balanced(xh, kh, vh, valid, chosen, causal=causal)
    else:
        chosen = nearest_clusters(q, centroids, heads=heads) if clusters is None else clusters
        there = valid[:, None].expand_as(chosen)
        order = sort_by_bucket(chosen, there, centroids.shape[1])
        codes = coded(chosen, order.rank, there, q.shape[1] + window)
        fit = {"size": window, "before": 1, "after": 0, "reach": window - 1}
        y = ratio(attend_sorted(xh, kh, vh, codes[:, :, None], order, causal=True, itself=True, **fit))
    return torch.where(valid[..., None], y.transpose(1, 2).flatten(2), 0.0).to(v.dtype)


@exact
def routing_chunk(
    q: Tensor, keys: Tensor, values: Tensor, clusters: Tensor, valid: Tensor, *, heads: int, window: int, count: int
) -> Tensor:
    """Compute the causal strict form for the last L tokens, q (B, L, D), over all S.

    keys (B, S, D) before LayerNorm, clusters (B, heads, S).
    """
    L = q.shape[1]
    there = valid[:, None].expand_as(clusters)
    codes = coded(clusters, sort_by_bucket(clusters, there, count).rank, there, keys.shape[1] + window)

    def form(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        xh, _, _ = _prepared(q, q, valid[:, -L:], heads)
        _, kh, vh = _prepared(keys, values, valid, heads)
        y = ratio(attend_dense(xh, kh, vh, codes[:, :, None], reach=window - 1, itself=True))
        return torch.where(valid[:, -L:, None], y.transpose(1, 2).flatten(2), 0.0)

    return honest(form, q, keys, values, causal=True, key_mask=valid)


def _prepared(q: Tensor, v: Tensor, valid: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled queries, keys and values per head, in float32 or better, with zeros at masked tokens."""
    q, v = (torch.where(valid[..., None], a, 0.0) for a in (q, v))
    x = on_sphere(q, heads).to(sum_dtype(q))
    return x * x.shape[-1] ** -0.5, x, by_head(v.to(x.dtype), heads)


def _balanced(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, chosen: Tensor, *, causal: bool) -> Tensor:
    """Attend inside each centroid's tokens, chosen (B, H, k, w), and return to token order: (B, H, T, e)."""
    picked = valid[:, None, None].expand(*chosen.shape[:3], -1).gather(3, chosen)
    at = chosen.flatten(2)[..., None].expand(-1, -1, -1, q.shape[-1])
    qc, kc, vc = (a.gather(2, at).unflatten(2, chosen.shape[2:]) for a in (q, k, v))
    ok = in_order(chosen, chosen, causal=causal, itself=True) & picked[..., None, :]
    y = torch.where(picked[..., None], ratio(sums_of(qc, kc, vc, ok)), 0.0).flatten(2, 3)
    total = torch.zeros_like(v).scatter_add(2, at, y)
    taken = torch.zeros_like(v[..., :1]).scatter_add(2, at[..., :1], picked.flatten(2)[..., None].to(v.dtype))
    return total / taken.clamp_min(1.0)
