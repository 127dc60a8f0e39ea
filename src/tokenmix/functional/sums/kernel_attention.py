"""Sums of kernel attention: over all keys, over prefixes in blocks, and as a past that later tokens extend.

A past is what a stream carries, in float64 and of constant size, with e = D / heads:

    plain maps     total (B, D e), the sums of phi(k)^T v of each head; number (B,), the count of these keys
    softmax keys   m (B, D), the largest keys; num (B, D e) and den (B, D), the sums of exp(k - m)^T v and exp(k - m)

With heads = D the matrices of a head are single numbers and everything is element-wise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ...kernels.backend import masks, steps
from ...kernels.counts import mean_scale
from ...kernels.cpu import decode as step
from ...kernels.cpu import hydra as kernel
from ...kernels.extended import LONG, extend_on_kernel, has_gradient
from ...kernels.precision import at_least_float32, exact
from ...types import Options
from ..aft_chunk import absorb as absorb_features
from ..aft_chunk import aft_simple_chunk, read_past, simple_prefixes
from ..layout.checks import check_eps, check_flags
from ..layout.heads import by_head
from .nonfinite import propagate_nonfinite_chunk
from .softmax import FLOOR, MASKED_KEY, SCAN, SCAN_JUMP, Sums, cut_running_max, delay, merge, merge_heads, scan

EPS = 1e-6  # keeps the gradient at a zero token below 1000, within the range of float16
STEPPED = ("cosine", "identity", "mean")  # maps that the C kernels implement
BLOCK = 64  # tokens whose pairs are weighed directly in the causal form; results do not depend on it
Past = tuple[Tensor, ...]
SoftmaxPast = tuple[Tensor, Tensor, Tensor]


def _cosine(x: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(|x|^2 + eps).

    A long token is scaled so that its square stays finite; without eps, a token too short to be squared counts as zero.
    """
    unit = x.detach().abs().amax(-1, keepdim=True).clamp_min(1.0)
    x = x / unit
    square = x.square().sum(-1, keepdim=True) + eps / unit.square()
    return x * torch.where(square > 0, square, 1.0).rsqrt()


MAPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "cosine": _cosine,
    "elu": lambda x, eps: torch.where(x > 0, x + 1, torch.exp(x.clamp_max(0))),  # elu(x) + 1 would round exp(x) away
    "sigmoid": lambda x, eps: torch.sigmoid(x),
    "tanh": lambda x, eps: torch.tanh(x),
    "softmax": lambda x, eps: x.softmax(-1),  # for queries; for keys it is a ratio of sums
    "identity": lambda x, eps: x,
    "mean": lambda x, eps: x,
}


def check_feature(who: str, feature: str, normalise: bool, eps: float) -> tuple[str, str]:
    """Return the names of the query's and the key's map, refusing unknown ones and options that do not go together."""
    names = feature.split("/") if isinstance(feature, str) else []
    if len(names) not in (1, 2) or any(n not in MAPS for n in names):
        known = ", ".join(MAPS)
        raise MixerError(
            f"{who}: feature={feature!r} is unknown; choose one of {known}, or two of them as 'query/key'."
        )
    if normalise and names[-1] == "softmax":
        raise MixerError(
            f"{who}: feature={feature!r} has weights that already sum to 1 over the tokens; use normalise=False."
        )
    check_eps(who, eps, zero=True)
    check_flags(who, normalise=normalise)
    return names[0], names[-1]


def empty_sums(batch: int, dim: int, heads: int, *, softmax: bool, device: torch.device | str | None = None) -> Past:
    """Return the sums over no keys."""
    total = torch.zeros(batch, dim * (dim // heads), device=device, dtype=torch.float64)
    if not softmax:
        return total, torch.zeros(batch, device=device, dtype=torch.long)
    none = torch.zeros(batch, dim, device=device, dtype=torch.float64)
    return none + FLOOR, total, none


@exact
def absorb(past: Past, k: Tensor, v: Tensor, valid: Tensor | None, *, heads: int, feature: str, eps: float) -> Past:
    """Return the sums after keys and values (B, S, D) have been added."""
    dim, of_keys = k.shape[-1], feature.split("/")[-1]
    if k.shape[1] == 0:
        return past
    if of_keys != "softmax":
        fk, fv = _map_keys(k, v, valid, of_keys, eps)
        return past[0] + _outer(fk, fv, heads).flatten(1), past[1] + _number(valid, k)
    if heads == dim:
        return absorb_features(past, k, v, valid)  # type: ignore[arg-type]  # three tensors with softmax
    joined = merge(_unflatten_sums(past, heads), _sums_of(*_split(k, v, valid, heads)))
    return _flatten_sums(joined)


@exact
def read_sums(q: Tensor, past: Past, *, heads: int, feature: str, normalise: bool, eps: float) -> Tensor:
    """Read finished sums with queries (B, T, D)."""
    of_query, of_keys = feature.split("/")[0], feature.split("/")[-1]
    fq = MAPS[of_query](at_least_float32(q), eps)
    if of_keys == "softmax":
        if heads == q.shape[-1]:
            return read_past(fq, past, gate="identity").to(q.dtype)  # type: ignore[arg-type]  # three tensors
        s = _unflatten_sums(past, heads)
        y = (by_head(fq.double(), heads) / _positive(s.acc[..., -1, :])) @ s.acc[..., 0, :-1, :].mT
        return merge_heads(y).to(q.dtype)
    total = past[0] / past[1].clamp_min(1)[:, None] if normalise or of_keys == "mean" else past[0]
    if heads == q.shape[-1]:
        return (fq * total[:, None].to(fq.dtype)).to(q.dtype)
    return merge_heads(by_head(fq, heads) @ _matrices(total, heads, q.shape[-1]).to(fq.dtype)).to(q.dtype)


def extend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past,
    *,
    valid: Tensor | None,
    heads: int,
    feature: str,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Past]:
    """Apply ``extend_sums`` to a stream, on the C kernels where heads = D and they implement the map."""
    of_query, of_keys = feature.split("/")[0], feature.split("/")[-1]
    if heads == q.shape[-1] and q.shape == k.shape == v.shape:
        if of_keys == "softmax":
            sums: Any = past  # three of them
            y, after = aft_simple_chunk(
                MAPS[of_query](at_least_float32(q), eps), k, v, sums, key_mask=valid, gate="identity"
            )
            return y.to(q.dtype), after
        q, graph = q.contiguous(), has_gradient(q, k, v, *past)
        if (
            of_query == of_keys in STEPPED
            and past[0].shape == (q.shape[0], heads)
            and steps((q, k, v), past, derives=graph)
            and _has_kernel_layout(past, valid, k)
        ):
            valid = None if valid is None else valid.contiguous()
            cosine, mean = of_keys == "cosine", normalise or of_keys == "mean"
            if not graph and k.shape[1] < LONG:
                pair: Any = past  # two of them
                return step.hydra(q, k, v, valid, pair, cosine=cosine, mean=mean, eps=eps)
            return _extend_in_c(q, k, v, past, valid, cosine=cosine, mean=mean, eps=eps)
    options: Options = {"heads": heads, "feature": feature, "normalise": normalise, "eps": eps}
    return _extend_in_torch(q, k, v, past, valid, **options)


def _extend_in_torch(
    q: Tensor, k: Tensor, v: Tensor, past: Past, valid: Tensor | None, **options: Any
) -> tuple[Tensor, Past]:
    """Compute ``extend_chunk`` in plain torch."""

    def form(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Past]:
        return extend_sums(q, k, v, past, valid=valid, **options)

    return propagate_nonfinite_chunk(form, q, k, v, key_mask=valid)


def _extend_in_c(
    q: Tensor, k: Tensor, v: Tensor, past: Past, valid: Tensor | None, *, cosine: bool, mean: bool, eps: float
) -> tuple[Tensor, Past]:
    """Compute ``extend_chunk`` with one feature per head on the C kernel, with gradients."""
    total, number = past
    options: Options = {
        "heads": q.shape[-1],
        "feature": "cosine" if cosine else "identity",
        "normalise": mean,
        "eps": eps,
    }

    def call_eager(q: Tensor, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, Past]:
        y, after = _extend_in_torch(q, k, v, (past[1], number), valid, **options)
        return y, (past[0], after[0])

    unit = torch.zeros_like(total)  # the sum has none
    scale = mean_scale(valid, q, k.shape[1], True, number[:, None]) if mean else None
    y, (_, after) = extend_on_kernel(
        kernel, call_eager, (q, k, v), valid, (unit, total), cosine=cosine, eps=eps, scale=scale
    )
    return y, (after, number + _number(valid, k))


def _has_kernel_layout(past: Past, valid: Tensor | None, k: Tensor) -> bool:
    """Return whether the sums, their count and a mask have the layout that the C kernel reads without checking."""
    total, number = past
    return (
        total.dtype is torch.float64 and number.dtype is torch.int64 and number.shape == k.shape[:1] and masks(k, valid)
    )


@exact
def extend_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past,
    *,
    valid: Tensor | None,
    heads: int,
    feature: str,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Past]:
    """Mix L new tokens, each over the past and the new ones up to itself: outputs (B, L, D) and the sums after them."""
    of_query, of_keys = feature.split("/")[0], feature.split("/")[-1]
    fq = MAPS[of_query](at_least_float32(q), eps)
    if of_keys == "softmax":
        if heads == q.shape[-1]:
            y, after = simple_prefixes(fq, k, v, past, key_mask=valid, gate="identity")  # type: ignore[arg-type]  # three tensors
        else:
            y, after = _softmax_prefixes(fq, k, v, past, valid, heads)
        return y.to(q.dtype), after
    fk, fv = _map_keys(k, v, valid, of_keys, eps)
    seen = past[1][:, None] + (
        valid.cumsum(1) if valid is not None else torch.arange(1, k.shape[1] + 1, device=k.device)
    )
    prefixes = _feature_prefixes if heads == q.shape[-1] else _matrix_prefixes
    y, total = prefixes(fq, fk, fv, past[0], heads)
    if normalise or of_keys == "mean":
        y = y / seen.clamp_min(1)[..., None].to(y.dtype)
    return y.to(q.dtype), (total, seen[:, -1])


def merge_sums(earlier: Past, later: Past) -> Past:
    """Return the sums over two adjacent stretches of tokens."""
    if len(earlier) == 2:
        return earlier[0] + later[0], earlier[1] + later[1]
    dim = earlier[0].shape[1]
    heads = dim * dim // earlier[1].shape[1]
    return _flatten_sums(merge(_unflatten_sums(earlier, heads), _unflatten_sums(later, heads)))


def _feature_prefixes(fq: Tensor, fk: Tensor, v: Tensor, past: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Compute a prefix sum for each feature."""
    running = (fk * v).cumsum(1, dtype=torch.float64) + past[:, None]
    return fq * running.to(fq.dtype), running[:, -1].contiguous()


def _matrix_prefixes(fq: Tensor, fk: Tensor, v: Tensor, past: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Work in blocks: sums before a block as matrices, pairs inside a block individually."""
    L = fq.shape[1]
    q, k, v = (_pad(by_head(a, heads), BLOCK) for a in (fq, fk, v))
    running = _matrices(past, heads, fq.shape[-1])[:, :, None] + (k.mT @ v).cumsum(2, dtype=torch.float64)
    before = torch.cat([_matrices(past, heads, fq.shape[-1])[:, :, None], running[:, :, :-1]], 2)
    y = (q @ k.mT).tril() @ v + q @ before.to(q.dtype)
    return merge_heads(y.flatten(2, 3)[:, :, :L]), running[:, :, -1].flatten(1)


def _softmax_prefixes(
    fq: Tensor, k: Tensor, v: Tensor, past: Past, valid: Tensor | None, heads: int
) -> tuple[Tensor, SoftmaxPast]:
    """Do the same when each row has its own maxima and denominators, one for each feature of the keys.

    See ``softmax`` on the running maximum.
    """
    L = fq.shape[1]
    kh, vh = _split(k, v, valid, heads)
    kb, vb, q = _pad(kh, SCAN, MASKED_KEY), _pad(vh, SCAN), _pad(by_head(fq.double(), heads), SCAN)
    start = _unflatten_sums(past, heads)
    first = Sums(*(a[:, :, None] for a in start))
    running = scan(_sums_of(kb, vb))
    before, after = merge(first, delay(running, 1)), merge(start, Sums(*(a[:, :, -1] for a in running)))
    top, rise = cut_running_max(kb, SCAN_JUMP)
    terms = torch.exp(kb - top + rise)
    m = torch.maximum(top, before.m)
    inside, beyond = torch.exp(top - m - rise), torch.exp(before.m - m)
    asked = q / _positive(inside * terms.cumsum(-2) + beyond * before.acc[..., -1, :])
    y = ((asked * inside) @ terms.mT).tril() @ vb + (asked * beyond) @ before.acc[..., 0, :-1, :].mT
    return merge_heads(y.flatten(2, 3)[:, :, :L]), _flatten_sums(after)


def _sums_of(k: Tensor, v: Tensor) -> Sums:
    """Sum keys (..., S, e) and values (..., S, e) under the largest key.

    m (..., 1, e), acc (..., 1, e + 1, e), whose last row holds the denominators.
    """
    m = k.detach().amax(-2, keepdim=True).clamp_min(FLOOR)
    acc = F.pad(v, (0, 1), value=1.0).mT @ torch.exp(k - m)
    return Sums(m, torch.zeros_like(m), acc[..., None, :, :])


def _map_keys(k: Tensor, v: Tensor, valid: Tensor | None, name: str, eps: float) -> tuple[Tensor, Tensor]:
    """Return phi(k) and v, with value 0 for masked tokens.

    Masked tokens are hidden before the map, so that nothing in them can affect a gradient.
    """
    k, v = at_least_float32(k), at_least_float32(v)
    if valid is not None:
        k, v = torch.where(valid[..., None], k, 0.0), torch.where(valid[..., None], v, 0.0)
    return MAPS[name](k, eps), v


def _outer(fk: Tensor, v: Tensor, heads: int) -> Tensor:
    """Compute sum_s phi(k_s)^T v_s of each head in float64: (B, heads, e, e), or (B, D) when e is 1."""
    if heads == fk.shape[-1]:
        return (fk * v).sum(1, dtype=torch.float64)
    return (by_head(fk, heads).mT @ by_head(v, heads)).double()


def _number(valid: Tensor | None, k: Tensor) -> Tensor | int:
    return k.shape[1] if valid is None else valid.sum(1)


def _matrices(total: Tensor, heads: int, dim: int) -> Tensor:
    """View (B, D e) as (B, heads, e, e)."""
    return total.unflatten(-1, (heads, dim // heads, -1))


def _pad(a: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Cut (B, heads, T, e) into blocks (B, heads, n, size, e), padding the last one."""
    return F.pad(a, (0, 0, 0, -a.shape[-2] % size), value=value).unflatten(-2, (-1, size))


def _split(k: Tensor, v: Tensor, valid: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """Split keys and values into float64 heads (B, heads, S, e); masked tokens get key MASKED_KEY and value 0."""
    k, v = k.double(), v.double()
    if valid is not None:
        k, v = torch.where(valid[..., None], k, MASKED_KEY), torch.where(valid[..., None], v, 0.0)
    return by_head(k, heads), by_head(v, heads)


def _positive(den: Tensor) -> Tensor:
    return torch.where(den > 0, den, 1.0)


def _unflatten_sums(past: Past, heads: int) -> Sums:
    """View a flat past as Sums: m (B, heads, 1, e), acc (B, heads, 1, e + 1, e)."""
    m, num, den = past
    m = m.unflatten(-1, (heads, 1, -1))
    acc = torch.cat([num.unflatten(-1, (heads, -1, m.shape[-1])), den.unflatten(-1, (heads, 1, -1))], 2)
    return Sums(m, torch.zeros_like(m), acc[:, :, None])


def _flatten_sums(s: Sums) -> SoftmaxPast:
    """Flatten sums to m (B, D), num (B, D e), den (B, D)."""
    return s.m.flatten(1), s.acc[..., :-1, :].flatten(1), s.acc[..., -1, :].flatten(1)
