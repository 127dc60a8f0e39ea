"""Attention through induced points (Set Transformer, Lee et al. 2019, Eq. 10): two attentions with m learned points."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend
from ..kernels.precision import at_least_float32, exact
from .attention import attention, finite_attention
from .layout.masks import zero_masked
from .sums.nonfinite import hides


@exact
@hides("k", "v", asks="q")
def induced_set(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    points: Tensor,
    maps: tuple[Tensor, ...],
    block: tuple[Tensor, ...] = (),
    *,
    heads: int,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y = attention(q, W_k h, W_v h) with h = attention(points, k, v), each of ``heads`` heads.

    Args:
        q: (B, T, D). k, v: (B, S, D).
        points: (m, D), the queries of the first attention.
        maps: (W_k, W_v), or (W_k, W_v, b_k, b_v): the keys and values of the second attention.
        block: empty, or (g_1, c_1, W, b, g_2, c_2): then h = LN_2(a + relu(W a + b)), a = LN_1(points + attention),
            with gains g and shifts c.

    With no key to attend the result is exactly 0. The m rows of h are computed in float64. Time O((T + S) m D).
    Positions are not used.
    """
    if q.shape[-1] % heads or points.shape[-1] != q.shape[-1]:
        raise MixerError(
            f"induced_set: heads={heads} must divide D={q.shape[-1]}, the width of points {tuple(points.shape)}."
        )
    h = induced(k, v, points, block, heads=heads, key_mask=key_mask)
    keys, values = (F.linear(h, w.double(), b) for w, b in zip(maps[:2], _biases(maps), strict=True))
    wide = at_least_float32(q)
    y = finite_attention(wide, keys.to(wide.dtype), values.to(wide.dtype), heads=heads, backend=backend).to(q.dtype)
    if k.shape[1] == 0:
        return torch.zeros_like(y)
    return y if key_mask is None else torch.where(key_mask.any(1)[:, None, None], y, 0.0)


@exact
def induced(
    k: Tensor, v: Tensor, points: Tensor, block: tuple[Tensor, ...], *, heads: int, key_mask: Tensor | None
) -> Tensor:
    """Compute the induced points' summary h (B, m, D) of the keys and values, float64."""
    asked = points.double().expand(k.shape[0], -1, -1)
    h = attention(asked, zero_masked(k, key_mask).double(), v.double(), heads=heads, key_mask=key_mask)
    if not block:
        return h
    gain_1, shift_1, weight, bias, gain_2, shift_2 = (a.double() for a in block)
    a = F.layer_norm(asked + h, gain_1.shape, gain_1, shift_1)
    return F.layer_norm(a + F.linear(a, weight, bias).relu(), gain_2.shape, gain_2, shift_2)


def _biases(maps: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if len(maps) == 2 else (maps[2].double(), maps[3].double())
