"""Linear attention (Katharopoulos et al. 2020): phi(q) . phi(k) with a positive feature map replaces exp(q . k)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.backend import Backend, choose, is_exporting, masks, steps
from ..kernels.cpu import decode as step
from ..kernels.cpu import linear as kernel
from ..kernels.extended import LONG, extend_on_kernel, has_gradient
from ..kernels.operator import Operator
from ..kernels.precision import at_least_float32, exact
from .aft import aft_simple
from .layout.checks import check_name, check_qkv
from .sums import features as sums
from .sums.nonfinite import propagate_nonfinite, propagate_nonfinite_chunk
from .sums.softmax import MASKED_KEY, SCAN, single_key_ratio, valid_weight

FEW, WIDE = 6, 1024
"""Limits of ``faster_in_torch``, as measured.

Torch's matrix products are faster if the queries and keys together number at most e / FEW = e / 6, where e is the width
of a head, in the causal form for T <= SCAN only. Without causal masking they are also faster where the sums exceed the
cache: with e >= WIDE if queries and keys number at most e / 2, and with e >= 2 WIDE always.
"""


def _log_positive(x: Tensor) -> Tensor:
    """Return log(x) where x > 0, and elsewhere ``MASKED_KEY``, which represents log(0)."""
    return torch.where(x > 0, torch.log(torch.where(x > 0, x, 1.0)), MASKED_KEY)


def _log_softmax(x: Tensor) -> Tensor:
    """Compute log softmax over the features.

    The maximum is subtracted first, because the logarithm of a sum near e^10000 would be rounded to a thousandth.
    """
    x = x - x.detach().amax(-1, keepdim=True)
    return x - torch.logsumexp(x, -1, keepdim=True)


LOG_FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: torch.where(x > 0, torch.log1p(x.clamp_min(0.0)), x),
    "relu": _log_positive,
    "squared_relu": lambda x: torch.where(x > 0, 2.0 * _log_positive(x), MASKED_KEY),
    "exp": lambda x: x,
    "softmax": _log_softmax,
}
"""The logarithm of each feature map phi: elu(x) + 1, max(x, 0), max(x, 0)^2, exp(x), softmax of x over its features."""


@exact
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    feature: str = "elu",
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute linear attention (Katharopoulos et al. 2020, Eqs. 4 to 6; causal: Eqs. 8 to 12).

    y_t = sum_s (phi(q_t) . phi(k_s)) v_s / sum_s phi(q_t) . phi(k_s) in each head, phi = elu + 1 by default. Takes time
    O(T e D); the causal form stores O(T e D / 32) numbers.

    Args:
        q: (B, T, H e).
        k, v: (B, S, H e).
        heads: number of heads H.
        feature: a name in ``LOG_FEATURES``. All maps are non-negative, as the denominator requires; with ``relu`` and
            ``squared_relu`` the weight of a pair may be exactly 0.
        causal: keep only keys s <= t.
        key_mask: bool (B, S), True = may be attended.
        backend: how to run; see ``choose``.

    Returns:
        (B, T, H e) in q's dtype; exactly 0 where nothing may be attended or every pair has weight 0.

    Raises:
        MixerError: shapes, dtypes or options do not fit, or the requested backend cannot run this call.
    """
    # With these maps a gradient may cancel to 0, for which the kernel's float32 is too coarse.
    lacks = f"its kernel has no feature={feature!r}" if feature in ("relu", "squared_relu") else None
    check_name("linear_attention", "feature", feature, LOG_FEATURES)
    check_qkv("linear_attention", q, k, v, heads, causal, key_mask)
    empty, short = 0 in (*q.shape, k.shape[1]), lacks is None and not is_exporting()
    lone_key, lone_feature = short and k.shape[1] == 1, short and q.shape[-1] == heads
    slower = lone_key or lone_feature or short and faster_in_torch(q, k, heads, causal)
    where = choose("linear_attention", backend, q, k, v, on=ratio_kernel.on, lacks=lacks, slower=slower)
    if where != "eager" and not empty:

        def on_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _on_kernel(q, k, v, key_mask, heads=heads, feature=feature, causal=causal)

        return (
            on_kernel(q, k, v)
            if where == "cpu"
            else propagate_nonfinite(on_kernel, q, k, v, causal=causal, key_mask=key_mask)
        )
    if lone_key and not empty:
        return _one_key(q, k, v, heads, feature, key_mask)
    if lone_feature and not empty:
        return _one_feature(q, k, v, feature, causal, key_mask, backend)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, (b, v1) = log_queries(q, heads, feature), log_keys(k, v, heads, feature, key_mask)
        return sums.joined_heads(sums.mix_features(a, b, v1, causal=causal), q)

    return propagate_nonfinite(form, q, k, v, causal=causal, key_mask=key_mask)


def _on_kernel(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, heads: int, feature: str, causal: bool
) -> Tensor:
    """Compute ``linear_attention`` with the kernels: (B, T, H e) in q's dtype.

    The kernel computes the features "elu" and "exp" itself; for others it is given their logarithms.
    """
    if feature not in ("elu", "exp"):
        a, b = (_log_features(x, heads, feature).flatten(2) for x in (q, sums.zero_masked(k, key_mask)))
        return ratio_kernel(a, b, at_least_float32(v), key_mask, heads, False, causal).to(q.dtype)
    return ratio_kernel(q, k, v, key_mask, heads, feature == "elu", causal)


def _run_eager(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, heads: int, elu: bool, causal: bool) -> Tensor:
    return linear_attention(
        q, k, v, heads=heads, feature="elu" if elu else "exp", causal=causal, key_mask=key_mask, backend="eager"
    )


ratio_kernel = Operator(
    "linear",
    "q(B,T,D) k(B,S,D) v(B,S,D) key_mask?!(B,S):bool",
    "int heads, bool elu, bool causal",
    saves=("saved",),
    keeps_result=True,
    eager=_run_eager,
    fits=lambda at, given: (
        given["heads"] > 0 and at["D"] % given["heads"] == 0 and (not given["causal"] or at["T"] == at["S"])
    ),
    on=("cpu", "triton", "onnx"),
)
"""Compute linear attention, (B, T, H e), with the feature map elu + 1 if ``elu``, otherwise exp."""


def faster_in_torch(q: Tensor, k: Tensor, heads: int, causal: bool) -> bool:
    """Return whether torch's matrix products are faster than the C kernel at these shapes, by a measured rule.

    The kernel works on e x e sums however few the tokens are. ``FEW`` and ``WIDE`` hold the limits.
    """
    e, tokens = q.shape[-1] // heads, q.shape[1] + k.shape[1]
    if q.is_cuda or causal and q.shape[1] > SCAN:
        return False
    return FEW * tokens <= e or not causal and (e >= 2 * WIDE or e >= WIDE and 2 * tokens <= e)


def _log_features(x: Tensor, heads: int, feature: str) -> Tensor:
    """Compute log phi(x), (B, T, H, e), in float32 or wider."""
    return LOG_FEATURES[feature](at_least_float32(x).unflatten(-1, (heads, -1)))


def _one_key(q: Tensor, k: Tensor, v: Tensor, heads: int, feature: str, key_mask: Tensor | None) -> Tensor:
    """Compute linear attention over a single key: its value, whatever its weight, or 0 where it is masked."""
    k, v = sums.zero_masked(k, key_mask), sums.zero_masked(v, key_mask).unflatten(-1, (heads, -1))
    weight = (valid_weight(_log_features(q, heads, feature)) * valid_weight(_log_features(k, heads, feature))).sum(
        -1, keepdim=True
    )
    if key_mask is not None:
        weight = torch.where(key_mask[..., None, None], weight, 0.0)
    return single_key_ratio(v, weight).flatten(2).to(q.dtype)


def _one_feature(
    q: Tensor, k: Tensor, v: Tensor, feature: str, causal: bool, key_mask: Tensor | None, backend: Backend
) -> Tensor:
    """Compute linear attention with heads of width 1: phi(q) cancels, which leaves AFT-simple with keys log phi(k)."""
    heads = q.shape[-1]
    b = _log_features(sums.zero_masked(k, key_mask), heads, feature).flatten(2)
    y = aft_simple(q, b, v.to(b.dtype), causal=causal, key_mask=key_mask, gate=None, backend=backend)
    return single_key_ratio(y, valid_weight(_log_features(q, heads, feature).flatten(2))).to(q.dtype)


def _kernel_accepts(
    new: tuple[Tensor, ...], past: tuple[Tensor, ...], feature: str, key_mask: Tensor | None, *, derives: bool
) -> bool:
    """Return whether the C kernels can continue a stream with these queries, keys and values, or keys and values."""
    return feature in ("elu", "exp") and steps(new, past, derives=derives) and masks(new[-1], key_mask)


def linear_chunk(
    q: Tensor, k: Tensor, v: Tensor, past: sums.Past, *, heads: int, feature: str, key_mask: Tensor | None
) -> tuple[Tensor, sums.Past]:
    """Compute causal linear attention for new tokens (B, L, H e) of a stream.

    The new tokens attend to each other causally and, through the sums ``past``, to all keys before them.

    Returns:
        The outputs, (B, L, H e) in q's dtype, and the sums after the new tokens.
    """
    e, graph = q.shape[-1] // heads, has_gradient(q, k, v, *past)
    fits = (
        q.shape == k.shape == v.shape
        and past[0].shape == (q.shape[0], heads, e)
        and past[1].shape == (q.shape[0], heads, e + 1, e)
        and past[0].dtype is past[1].dtype is torch.float64
    )

    def call_eager(q: Tensor, k: Tensor, v: Tensor, past: sums.Past) -> tuple[Tensor, sums.Past]:
        def form(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, sums.Past]:
            y, after = sums.causal_read(log_queries(q, heads, feature), *log_keys(k, v, heads, feature, key_mask), past)
            return sums.joined_heads(y, q), after

        return propagate_nonfinite_chunk(form, q, k, v, key_mask=key_mask)

    if fits and _kernel_accepts((q, k, v), past, feature, key_mask, derives=graph):
        valid = None if key_mask is None else key_mask.contiguous()
        if graph or k.shape[1] >= LONG:
            return extend_on_kernel(kernel, call_eager, (q, k, v), valid, past, elu=feature == "elu")
        if feature == "elu":
            return step.linear(q, k, v, valid, past)
    return call_eager(q, k, v, past)


def linear_sums(k: Tensor, v: Tensor, *, heads: int, feature: str, key_mask: Tensor | None) -> sums.Past:
    """Compute the sums over keys and values (B, S, H e)."""
    B, S, D = k.shape
    if S >= LONG and has_gradient(k, v) and _kernel_accepts((k, v), (), feature, key_mask, derives=True):
        # A pass of the kernel keeps less for the backward pass than the features do.
        past = sums.empty_features(B, heads, D // heads, D // heads, device=k.device)
        return linear_chunk(k, k, v, past, heads=heads, feature=feature, key_mask=key_mask)[1]
    return sums.absorb(*log_keys(k, v, heads, feature, key_mask))


def log_queries(q: Tensor, heads: int, feature: str) -> Tensor:
    """Compute log phi(q), (B, H, T, e)."""
    return LOG_FEATURES[feature](sums.wide_by_head(q, heads))


def log_keys(k: Tensor, v: Tensor, heads: int, feature: str, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute log phi(k), (B, H, S, e), and append a channel of ones to the values; masked keys get weight 0."""
    b = LOG_FEATURES[feature](sums.wide_by_head(sums.zero_masked(k, key_mask), heads))
    return sums.masked_features(b, key_mask), sums.with_ones(sums.zero_masked(v, key_mask), heads)
