"""Performer (Choromanski et al. 2021): positive random features of the softmax kernel (FAVOR+), and generalisations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact
from .layout.checks import check_eps, check_name, check_qkv
from .layout.masks import zero_masked
from .sums import features as sums
from .sums.nonfinite import guard_nonfinite, propagate_nonfinite_chunk

PERFORMER_FEATURES = ("softmax", "relu")


def check_feature(who: str, feature: str, eps: float) -> None:
    """Refuse random features that do not exist, and an eps that lets all features be 0."""
    check_name(who, "feature", feature, PERFORMER_FEATURES)
    check_eps(who, eps, zero=False)


@exact
@guard_nonfinite("k", "v", asks="q")
def performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    heads: int,
    feature: str = "softmax",
    eps: float = 1e-3,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_s (phi(q_t) . phi(k_s)) v_s / sum_s phi(q_t) . phi(k_s) in each head.

    phi is made from random projections w_1..w_M.
    ``softmax`` (Lemma 1): phi(x)_i = exp(w_i . x' - |x'|^2 / 2) / sqrt(M), x' = x / e^(1/4), so that
        E[phi(q) . phi(k)] = exp(q . k / sqrt(e)).
    ``relu`` (generalised attention): phi(x)_i = max(w_i . x, 0) / sqrt(M) + eps.

    Args:
        q: (B, T, H e). k, v: (B, S, H e).
        projection: (H, M, e), the w_i of each head.
        eps: keeps generalised features positive; the softmax features are positive already, and no stabiliser is added
            to them.

    Returns:
        (B, T, H e) in q's dtype, exactly 0 where nothing may be attended. Factors shared by all features of a query
        cancel and are left out.
    """
    choose("performer", backend, q)
    check_feature("performer", feature, eps)
    check_qkv("performer", q, k, v, heads, causal, key_mask)
    if projection.ndim != 3 or projection.shape[0] != heads or projection.shape[2] * heads != q.shape[2]:
        raise MixerError(
            f"performer: projection must be ({heads}, M, {q.shape[2] // heads}), got {tuple(projection.shape)}."
        )
    a, (b, v1) = log_queries(q, projection, feature, eps), log_keys(k, v, projection, feature, eps, key_mask)
    return sums.joined_heads(sums.mix_features(a, b, v1, causal=causal), q)


def performer_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: sums.Past,
    projection: Tensor,
    *,
    feature: str,
    eps: float,
    key_mask: Tensor | None,
) -> tuple[Tensor, sums.Past]:
    """Mix new tokens (B, L, H e) over the sums of all earlier keys and each other: outputs, and the sums after them."""

    def form(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, sums.Past]:
        y, after = sums.causal_read(
            log_queries(q, projection, feature, eps), *log_keys(k, v, projection, feature, eps, key_mask), past
        )
        return sums.joined_heads(y, q), after

    return propagate_nonfinite_chunk(form, q, k, v, key_mask=key_mask)


def log_queries(q: Tensor, projection: Tensor, feature: str, eps: float) -> Tensor:
    """Compute log phi(q) up to a constant per query, (B, H, T, M)."""
    x = sums.wide_by_head(q, projection.shape[0])
    return (
        _scale_input(x) @ projection.double().transpose(-1, -2)
        if feature == "softmax"
        else _log_relu(x, projection, eps)
    )


def log_keys(
    k: Tensor, v: Tensor, projection: Tensor, feature: str, eps: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute log phi(k) (B, H, S, M) up to a constant for all keys, and the values with a channel of ones."""
    heads = projection.shape[0]
    x = sums.wide_by_head(zero_masked(k, key_mask), heads)
    if feature == "softmax":
        x = _scale_input(x)
        b = x @ projection.double().transpose(-1, -2) - x.square().sum(-1, keepdim=True) / 2
    else:
        b = _log_relu(x, projection, eps)
    return sums.masked_features(b, key_mask), sums.with_ones(zero_masked(v, key_mask), heads)


def _scale_input(x: Tensor) -> Tensor:
    return x * x.shape[-1] ** -0.25


def _log_relu(x: Tensor, projection: Tensor, eps: float) -> Tensor:
    return torch.log((x @ projection.double().transpose(-1, -2)).relu() * projection.shape[1] ** -0.5 + eps)


def orthogonal_features(heads: int, features: int, width: int, *, orthogonal: bool = True) -> Tensor:
    """Draw (H, M, e) float64 in which each w_i is marginally N(0, I).

    With ``orthogonal``, the w_i of a block of e are mutually orthogonal (the O of FAVOR+). The numbers come from the
    CPU's default generator whatever the device, so that a seed means the same everywhere.
    """
    blocks = -(-features // width)
    gaussian = torch.randn(heads, blocks, width, width, dtype=torch.float64, device="cpu")
    if not orthogonal:
        return gaussian.flatten(1, 2)[:, :features].contiguous()
    rotation, upper = torch.linalg.qr(gaussian)
    # makes the rotation uniform, whatever signs the factorisation chooses
    signs = upper.diagonal(dim1=-2, dim2=-1).sign()
    norms = torch.randn(heads, blocks, width, width, dtype=torch.float64, device="cpu").norm(dim=-1, keepdim=True)
    return ((rotation * signs[..., None, :]) * norms).flatten(1, 2)[:, :features].contiguous()
