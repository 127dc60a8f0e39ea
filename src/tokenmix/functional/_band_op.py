"""AFT-local and AFT-conv in one dimension as an operator: ``tokenmix::aft_band`` and its backward, and the band of a matrix of log-weights.

The operator takes log-weights w (1 or B, 1 or h, 1 or T, L) in float32, whatever q, k and v are: entry j of row t belongs to key t + j - low, low = L - 1
when causal and L // 2 otherwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._ops import define, derive_twice, differentiable, kernels, needs_grad
from .sums.band import band_sums, causal_sums
from .sums.softmax import narrow, ratio_of, wide
from .sums.weights import Banded, Toeplitz

BLOCK = 16  # rows of a block of the product of factors, at least


def aft_band_kernel(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, key_mask: Tensor | None, causal: bool) -> Tensor:
    """sigmoid(q) times the ratio of the sums, or the ratio alone without q: (B, T, D). k is (B, T, D), or (B, T, h) with a key per head."""
    return _forward(q, k, v, w, key_mask, causal, needs_grad(q, k, v, w))[0]


def band_of(w: Tensor | tuple[Tensor, Tensor], window: int, causal: bool) -> Tensor:
    """The band |t - s| < window, s <= t when causal, of log-weights (T, T) or (B, T, T), or of factors (.., T, r): (1 or B, 1, T, L), float32.

    Entries beside the sequence hold anything. Only the band of a product of factors is formed, in float64: its rounding is an error of every weight.
    """
    T = (w[0] if isinstance(w, tuple) else w).shape[-2]
    low = min(window, T) - 1
    high = 0 if causal else low
    found = _of_factors(*w, low, high) if isinstance(w, tuple) else _of_matrix(w, low, high)
    return (found if found.ndim == 3 else found[None]).float()[:, None]


def _of_matrix(w: Tensor, low: int, high: int) -> Tensor:
    T = w.shape[-1]
    t, j = (torch.arange(n, device=w.device) for n in (T, low + 1 + high))
    return w.gather(-1, (t[:, None] + j - low).clamp(0, T - 1).expand(*w.shape[:-2], -1, -1))


def _of_factors(u: Tensor, v: Tensor, low: int, high: int) -> Tensor:
    T, width = u.shape[-2], low + 1 + high
    rows = max(BLOCK, min(width, T))
    blocks = -(-T // rows)
    u = F.pad(u.double(), (0, 0, 0, blocks * rows - T)).unflatten(-2, (blocks, rows))
    v = F.pad(v.double(), (0, 0, low, blocks * rows - T + high)).unfold(-2, rows + width - 1, rows)  # (.., blocks, r, keys)
    i, j = (torch.arange(n, device=u.device) for n in (rows, width))
    product = u @ v
    return product.gather(-1, (i[:, None] + j).expand(*product.shape[:-2], -1, -1)).flatten(-3, -2)[..., :T, :]


def _eager(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, key_mask: Tensor | None, causal: bool) -> Tensor:
    D, L = v.shape[-1], w.shape[-1]
    kd, vd = wide(k, v, key_mask, k.shape[-1] if k.shape[-1] != D or w.shape[1] > 1 else 1)
    low = L - 1 if causal else L // 2
    source = Toeplitz(w[:, :, 0], low) if w.shape[-2] == 1 else Banded(w, low)
    sums = causal_sums(kd, vd, source, reach=(-low, 0)) if causal else band_sums(kd, vd, source, reach=(-low, L - 1 - low))
    y = narrow(ratio_of(sums))
    return (y if q is None else torch.sigmoid(q) * y).to(v.dtype)


def _run(q, k, v, w, key_mask, causal, save):
    return kernels("aft_band", v).forward(q, k, v, w, key_mask, causal=causal, save=save)


def _fake(q, k, v, w, key_mask, causal, save):
    return v.new_empty(v.shape), v.new_empty(kernels("aft_band", v).saved_shape(v) if save else (0,), dtype=torch.float32)


def _run_backward(g, q, k, v, w, key_mask, y, saved, causal):
    return kernels("aft_band", v).backward(g, q, k, v, w, key_mask, saved, y=y, causal=causal)


def _fake_backward(g, q, k, v, w, key_mask, y, saved, causal):
    return v.new_empty((0,) if q is None else q.shape), v.new_empty(k.shape), v.new_empty(v.shape), w.new_empty(w.shape)


def _keep(ctx, inputs, output):
    q, k, v, w, key_mask, ctx.causal, _ = inputs
    ctx.save_for_backward(q, k, v, w, key_mask, *output)


def _derive(ctx, g, _):
    q, k, v, w, key_mask, y, saved = ctx.saved_tensors
    dq, dk, dv, dw = _backward(g, q, k, v, w, key_mask, y, saved, ctx.causal)
    return None if q is None else dq, dk, dv, dw, None, None, None


def _keep_twice(ctx, inputs, output):
    g, q, k, v, w, key_mask, _, _, ctx.causal = inputs
    ctx.save_for_backward(g, q, k, v, w, key_mask)


def _derive_backward(ctx, *weights):
    g, q, k, v, w, key_mask = ctx.saved_tensors
    dg, (dq, dk, dv, dw) = derive_twice(lambda *qkvw: _eager(*qkvw, key_mask, ctx.causal), (q, k, v, w), g, weights)
    return dg, dq, dk, dv, dw, None, None, None, None


_forward = define(
    "aft_band", "(Tensor? q, Tensor k, Tensor v, Tensor w, Tensor? key_mask, bool causal, bool save) -> (Tensor, Tensor)", cpu=_run, cuda=_run, fake=_fake
)
_backward = define(
    "aft_band_backward",
    "(Tensor g, Tensor? q, Tensor k, Tensor v, Tensor w, Tensor? key_mask, Tensor y, Tensor saved, bool causal) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_run_backward,
    cuda=_run_backward,
    fake=_fake_backward,
)
differentiable("aft_band", keep=_keep, derive=_derive)
differentiable("aft_band_backward", keep=_keep_twice, derive=_derive_backward)
