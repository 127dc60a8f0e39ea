"""AFT-local and AFT-conv on the C library: tensors in, tensors out, no autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from . import DTYPES, function, new, pointer, rows

_BLOCK = 60  # BAND_T

_forward = function("band_forward", "iiii" + "p" * 8 + "i")
_backward = function("band_backward", "iiii" + "p" * 13 + "i")


def saved_shape(v: Tensor) -> tuple[int, ...]:
    """The shape of what the backward pass needs besides inputs and output: 1 / denominators and three numbers per block; in half precision also the output."""
    B, T, D = v.shape
    return (B * D * ((1 if v.dtype == torch.float32 else 2) * T + 3 * -(-T // _BLOCK) + 1),)


def _sizes(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, g: Tensor | None) -> tuple[int, Tensor]:
    """Whether keys are per head, and band_of's numbers. ``w`` varies along a dimension where that is not 1."""
    (B, T, D), (Bw, Hw, Tw, L) = v.shape, w.shape
    per_head = k.shape[-1] != D or Hw > 1
    heads = k.shape[-1] if per_head else 1
    by_row = Tw == T and not per_head
    along = [step if varies else 0 for step, varies in zip(w.stride(), (Bw > 1, Hw > 1, by_row), strict=False)]
    strides = [n for a in (q, k, v, g) for n in ((0, 0) if a is None else a.stride()[:2])]
    numbers = [B, T, D, heads, L, *along, *strides]
    return int(per_head), torch.tensor(numbers)


def forward(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, *, causal: bool, save: bool) -> tuple[Tensor, Tensor]:
    """y_t = gate(q_t) * sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts), w_ts = 0 outside of the band.

    Args:
        q: (B, T, D) under a sigmoid, None for no gate; v: (B, T, D).
        k: (B, T, D), or (B, T, h) where channel c uses the key of head c // (D / h).
        w: log-weights (1 or B, 1 or h, 1 or T, L), float32; entry j of row t belongs to key t + j - (L - 1) when causal, t + j - L // 2 otherwise.
            Heads need keys per head, and have one row. Entries for keys before the first or after the last are not read.
        mask: (B, T), True = may be attended.

    Returns:
        (B, T, D), and what the backward pass needs (empty unless ``save``).
    """
    q, k, v, w = None if q is None else rows(q), rows(k), rows(v), w.contiguous()
    y = new(v.shape, v.dtype)
    saved = new(saved_shape(v) if save else (0,))
    mask = None if mask is None else mask.contiguous()
    per_head, numbers = _sizes(q, k, v, w, None)
    fixed = DTYPES[v.dtype], int(q is not None), int(causal), per_head, pointer(q), pointer(k), pointer(v), pointer(w), pointer(mask)
    _forward(*fixed, pointer(y), pointer(saved) if save else None, pointer(numbers), torch.get_num_threads())
    return y, saved


def backward(
    g: Tensor, q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, saved: Tensor, *, y: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq (empty without q), dk, dv, and dw as w, float32; y and saved are what forward returned."""
    g, q, k, v, w, y = rows(g), None if q is None else rows(q), rows(k), rows(v), w.contiguous(), y.contiguous()
    dk, dv, dw = new(k.shape, v.dtype), new(v.shape, v.dtype), new(w.shape)
    dq = new((0,) if q is None else q.shape, v.dtype)
    mask = None if mask is None else mask.contiguous()
    per_head, numbers = _sizes(q, k, v, w, g)
    fixed = DTYPES[v.dtype], int(q is not None), int(causal), per_head, pointer(q), pointer(k), pointer(v), pointer(w), pointer(mask)
    outputs = pointer(dq), pointer(dk), pointer(dv), pointer(dw)
    _backward(*fixed, pointer(y), pointer(g), pointer(saved), *outputs, pointer(numbers), torch.get_num_threads())
    return dq, dk, dv, dw
