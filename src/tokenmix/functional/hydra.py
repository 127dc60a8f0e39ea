"""Hydra attention (Bolya et al. 2022, arXiv:2209.07484), and kernel attention with any number of heads.

Hydra is the limit of as many heads as features. Tensors have layout (B, T, D). A feature map phi is given as one name
for queries and keys, such as "cosine", or as a pair "query/key", such as "sigmoid/softmax". Every map is applied to the
token's whole D-vector and the result is split into heads, so that heads = D is Hydra for every map:

    cosine    x / sqrt(|x|^2 + eps), the norm over all D features
    elu       elu(x) + 1
    sigmoid, tanh, identity
    softmax   keys: over the tokens that may be attended, in each feature;
              queries: over their own features (Shen et al. 2021)
    mean      the identity, with the sum over keys divided by their number

"sigmoid/softmax" with heads = D is AFT-simple.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.backend import Backend, choose
from ..kernels.operator import Operator
from ..kernels.precision import at_least_float32, exact
from ..types import Options
from .aft import simple_kernel
from .layout.checks import check_qkv
from .layout.masks import zero_masked
from .sums.kernel_attention import EPS, MAPS, absorb, check_feature, empty_sums, extend_sums, read_sums
from .sums.nonfinite import propagate_nonfinite

OWN = ("cosine", "identity", "mean")
"""Feature maps that the kernel computes itself; others are applied outside it."""


@exact
def hydra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature: str = "cosine",
    normalise: bool = False,
    eps: float = EPS,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute Hydra attention (Bolya et al. 2022).

    y_t = phi(q_t) * sum_s phi(k_s) * v_s, with elementwise products. Takes time and memory O(T D). Sums run in float64.

    Args:
        q: (B, T, D).
        k, v: (B, S, D).
        feature: feature map phi, one name or "query/key"; see the list at the top of this module.
        normalise: divide the sum by the number of keys that may be attended, so that its magnitude does not grow with
            T; the paper does not.
        eps: added to |x|^2 in the cosine map. A zero token gives zeros, even if eps is 0, where the paper's listing
            gives NaN.
        causal: keep only keys s <= t, as a prefix sum.
        key_mask: bool (B, S), True = may be attended.
        backend: how to run; see ``choose``.

    Returns:
        (B, T, D) in q's dtype; exactly 0 where a query has nothing to attend to.

    Raises:
        MixerError: shapes, dtypes or options do not fit, or the requested backend cannot run this call.
    """
    where = choose("hydra", backend, q, k, v, on=sum_kernel.on)
    if where != "eager":
        check_qkv("hydra", q, k, v, 1, causal, key_mask)
        check_feature("hydra", feature, normalise, eps)
        if 0 in (*q.shape, k.shape[1]):
            return torch.zeros_like(q)

        def on_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _on_kernel(q, k, v, key_mask, feature=feature, normalise=normalise, eps=eps, causal=causal)

        return (
            on_kernel(q, k, v)
            if where == "cpu"
            else propagate_nonfinite(on_kernel, q, k, v, causal=causal, key_mask=key_mask)
        )
    options: Options = {
        "feature": feature,
        "normalise": normalise,
        "eps": eps,
        "causal": causal,
        "key_mask": key_mask,
        "backend": "eager",
    }
    return _kernel_attention("hydra", q, k, v, heads=q.shape[-1], **options)


def _on_kernel(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, feature: str, normalise: bool, eps: float, causal: bool
) -> Tensor:
    """Compute ``hydra`` with the kernels: (B, T, D) in q's dtype."""
    of_q, of_k = feature.split("/")[0], feature.split("/")[-1]
    if of_k == "softmax":
        return _softmax_keys(q, k, v, key_mask, of_q, eps, causal)
    dtype, mean = q.dtype, normalise or of_k == "mean"
    if of_q not in OWN or of_k not in OWN:
        # Do not round features to half precision.
        q, k, v = map(at_least_float32, (q, k, v))
    if of_q not in OWN:
        q = MAPS[of_q](q, eps)
    if of_k not in OWN:
        k = MAPS[of_k](zero_masked(k, key_mask), eps)
    maps = of_q == "cosine", of_k == "cosine", float(eps)
    return sum_kernel(q, k, v, key_mask, causal, *maps, mean).to(dtype)


def _softmax_keys(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, of_q: str, eps: float, causal: bool
) -> Tensor:
    """Compute Hydra with softmax keys, through AFT-simple: its weights are the softmax of the keys over time."""
    if of_q == "sigmoid":
        return simple_kernel(q, k, v, key_mask, q.shape[1], causal)
    y = simple_kernel(None, k, v, key_mask, q.shape[1], causal)
    return (MAPS[of_q](at_least_float32(q), eps) * at_least_float32(y)).to(q.dtype)


def _run_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    of_q: bool,
    of_k: bool,
    eps: float,
    mean: bool,
) -> Tensor:
    names = ("identity", "cosine")
    feature = f"{names[of_q]}/{names[of_k]}"
    return hydra(q, k, v, feature=feature, normalise=mean, eps=eps, causal=causal, key_mask=key_mask, backend="eager")


sum_kernel = Operator(
    "hydra",
    "q(B,T,D) k(B,S,D) v(B,S,D) key_mask?!(B,S):bool",
    "bool causal, bool of_q, bool of_k, float eps, bool mean",
    saves=("saved",),
    eager=_run_eager,
    fits=lambda at, given: not given["causal"] or at["T"] == at["S"],
    on=("cpu", "triton", "onnx"),
)
"""Compute Hydra, (B, T, D), with the cosine map for queries, keys or both, and the identity otherwise."""


@exact
def multihead_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    feature: str = "cosine",
    normalise: bool = False,
    eps: float = EPS,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute kernel attention with ``heads`` heads, without a normaliser.

    y_t = phi(q_t) sum_s phi(k_s)^T v_s in each head of width e = D / heads. Takes time O(T D e). heads = 1 is full
    linear attention without a normaliser, heads = D is Hydra. The causal form works in blocks. The other arguments, the
    result and the errors are those of ``hydra``; there are no kernels, so it runs on the eager form only.
    """
    options: Options = {
        "feature": feature,
        "normalise": normalise,
        "eps": eps,
        "causal": causal,
        "key_mask": key_mask,
        "backend": backend,
    }
    return _kernel_attention("multihead_linear", q, k, v, heads=heads, **options)


def _kernel_attention(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    feature: str,
    normalise: bool,
    eps: float,
    causal: bool,
    key_mask: Tensor | None,
    backend: Backend,
) -> Tensor:
    choose(who, backend, q)
    split = 1 if who == "hydra" else heads  # the width of a traced tensor need not be an int
    check_qkv(who, q, k, v, split, causal, key_mask)
    of_keys = check_feature(who, feature, normalise, eps)[1]
    if 0 in (q.shape[1], k.shape[1]):
        return torch.zeros_like(q)
    past = empty_sums(q.shape[0], q.shape[-1], heads, softmax=of_keys == "softmax", device=q.device)
    options: Options = {"heads": heads, "feature": feature, "eps": eps}

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if causal:
            return extend_sums(q, k, v, past, valid=key_mask, normalise=normalise, **options)[0]
        return read_sums(q, absorb(past, k, v, key_mask, **options), normalise=normalise, **options)

    return propagate_nonfinite(form, q, k, v, causal=causal, key_mask=key_mask)
