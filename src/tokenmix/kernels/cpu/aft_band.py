"""Run AFT-local and AFT-conv on the C library, on tensors and without autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import DTYPES, empty_result, function, pointers, rows
from .nonfinite import NAN, Alarm, alarm_address, find_nan_gradients, is_marked, mark, mark_gradients, remove_nonfinite

_BLOCK = 60  # BAND_T

_forward = function("band_forward", "iiii" + "p" * 8 + "ip")
_backward = function("band_backward", "iiii" + "p" * 13 + "i")


def saved_shapes(
    q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, *, causal: bool
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides inputs and output.

    These are 1 / denominators and three numbers per block; in half precision also the output.
    """
    B, T, D = v.shape
    return [(B * D * ((1 if v.dtype == torch.float32 else 2) * T + 3 * -(-T // _BLOCK) + 1),)]


def _sizes(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, g: Tensor | None) -> tuple[int, Tensor]:
    """Return whether keys are per head, and the numbers of ``band_of``.

    ``w`` varies along each dimension whose size is not 1.
    """
    (B, T, D), (Bw, Hw, Tw, L) = v.shape, w.shape
    per_head = k.shape[-1] != D or Hw > 1
    heads = k.shape[-1] if per_head else 1
    by_row = Tw == T and not per_head
    along = [step if varies else 0 for step, varies in zip(w.stride(), (Bw > 1, Hw > 1, by_row), strict=False)]
    strides = [n for a in (q, k, v, g) for n in ((0, 0) if a is None else a.stride()[:2])]
    numbers = [B, T, D, heads, L, *along, *strides]
    return int(per_head), torch.tensor(numbers, dtype=torch.int64, device="cpu")


def forward(
    q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, *, causal: bool, save: bool
) -> tuple[Tensor, Tensor]:
    """Compute y_t = gate(q_t) * sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts), where w_ts = 0 outside the band.

    Args:
        q: (B, T, D), gating by a sigmoid, or None for no gate; v: (B, T, D).
        k: (B, T, D), or (B, T, h) where channel c uses the key of head c // (D / h).
        w: log-weights (1 or B, 1 or h, 1 or T, L), float32. Entry j of row t belongs to key t + j - (L - 1) when
            causal, t + j - L // 2 otherwise. Heads need keys per head, and have one row. Entries for keys before the
            first or after the last are not read.
        mask: (B, T), True = may be attended.

    Returns:
        (B, T, D), and the tensor saved for the backward pass (empty unless ``save``).
    """
    alarm = Alarm()
    y, saved = _run(q, k, v, w, mask, alarm, causal=causal, save=save)
    if alarm:
        w, bad = _remove_nan(w, mask, v.shape, causal)
        rest = remove_nonfinite(q, k, v, mask, v.shape[1], causal=causal, weights=bad)
        y = _run(rest.q, rest.k, rest.v, w, mask, None, causal=causal, save=False)[0].masked_fill_(rest.rows, NAN)
        mark(saved)
    return y, saved


def _run(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    mask: Tensor | None,
    alarm: Alarm | None,
    *,
    causal: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    q, k, v, w = None if q is None else rows(q), rows(k), rows(v), w.contiguous()
    y = empty_result(v.shape, v.dtype)
    saved = empty_result(saved_shapes(q, k, v, w, mask, causal=causal)[0] if save else (0,))
    mask = None if mask is None else mask.contiguous()
    per_head, numbers = _sizes(q, k, v, w, None)
    fixed = (
        DTYPES[v.dtype],
        int(q is not None),
        int(causal),
        per_head,
        *pointers(q, k, v, w, mask),
    )
    _forward(*fixed, *pointers(y, saved if save else None, numbers), torch.get_num_threads(), alarm_address(alarm))
    return y, saved


def backward(
    g: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    mask: Tensor | None,
    y: Tensor,
    saved: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq (empty without q), dk, dv, and dw shaped like w, in float32; y and saved are those of ``forward``."""
    if is_marked(saved):
        return _backward_without(g, q, k, v, w, mask, causal=causal)
    g, q, k, v, w, y = rows(g), None if q is None else rows(q), rows(k), rows(v), w.contiguous(), y.contiguous()
    dk, dv, dw = empty_result(k.shape, v.dtype), empty_result(v.shape, v.dtype), empty_result(w.shape)
    dq = empty_result((0,) if q is None else q.shape, v.dtype)
    mask = None if mask is None else mask.contiguous()
    per_head, numbers = _sizes(q, k, v, w, g)
    fixed = (
        DTYPES[v.dtype],
        int(q is not None),
        int(causal),
        per_head,
        *pointers(q, k, v, w, mask),
    )
    _backward(*fixed, *pointers(y, g, saved, dq, dk, dv, dw, numbers), torch.get_num_threads())
    return dq, dk, dv, dw


def _remove_nan(w: Tensor, mask: Tensor | None, shape: torch.Size, causal: bool) -> tuple[Tensor, Tensor]:
    """Return log-weights without NaN, and the rows and features (B or 1, T, D or 1) where a NaN meets a valid key."""
    (_, T, D), (_, heads, _, L) = shape, w.shape
    bad, low = w.isnan(), L - 1 if causal else L // 2
    live = torch.ones(1, T, dtype=torch.bool, device=w.device) if mask is None else mask
    near = F.pad(live, (low, L - 1 - low)).unfold(1, L, 1)  # (B, T, L): whether entry j of a row has a valid key
    rows = (bad & near[:, None]).any(-1).transpose(1, 2)
    return w.masked_fill(bad, 0.0), rows if heads == 1 else rows.repeat_interleave(D // heads, -1)


def _backward_without(
    g: Tensor, q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w, bad = _remove_nan(w, mask, v.shape, causal)
    rest = remove_nonfinite(q, k, v, mask, v.shape[1], causal=causal, weights=bad)
    hot = find_nan_gradients(g, rest.rows, mask, v.shape[1], causal=causal)
    y, saved = _run(rest.q, rest.k, rest.v, w, mask, None, causal=causal, save=True)
    *grads, dw = backward(hot.g, rest.q, rest.k, rest.v, w, mask, y, saved, causal=causal)
    dq, dk, dv = mark_gradients(grads, hot)
    rows = (
        hot.rows.unflatten(-1, (w.shape[1], -1)).any(-1).transpose(1, 2)[..., None]
    )  # (B, heads, T, 1); w has all heads or one
    for along in (0, 2):
        rows = rows if w.shape[along] > 1 else rows.any(along, keepdim=True)
    return dq, dk, dv, dw.masked_fill(rows, NAN)
