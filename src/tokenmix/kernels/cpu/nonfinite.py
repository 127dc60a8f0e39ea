"""Handle calls with keys, values, weights or queries that are NaN or infinite, in outputs and gradients.

The products of the kernels work on blocks of rows, in which what a row may not attend has the weight 0; but 0 * NaN is
NaN. So a kernel reports when an output is not finite. Then, and only then, the call is repeated without the NaN and
infinite numbers, and NaN is written into the rows that may attend them. The first number kept for the backward pass is
then NaN, which tells that pass to remove the same numbers, and the gradients of these rows.

A key of -inf has the weight 0, a log-weight of +inf counts as the largest; both are exact and stay.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import pointers

INF, NAN = float("inf"), float("nan")


class Alarm:
    """A flag that a kernel sets when an output is not finite."""

    def __init__(self) -> None:
        self.told = torch.zeros(1, dtype=torch.int32, device="cpu")

    def ring(self) -> None:
        self.told.fill_(1)

    def __bool__(self) -> bool:
        return bool(self.told.item())


def alarm_address(alarm: Alarm | None) -> int | None:
    """Return the address of the flag that a kernel sets, or None without an alarm."""
    return None if alarm is None else pointers(alarm.told)[0]


def mark(saved: Tensor) -> None:
    """Tell the backward pass that this call had to be repeated without some numbers."""
    saved.view(-1)[:1] = NAN


def is_marked(saved: Tensor) -> bool:
    """Return whether the saved tensor carries the NaN mark."""
    return saved.numel() > 0 and math.isnan(ctypes.c_float.from_address(saved.data_ptr()).value)


class Finite(NamedTuple):
    """The arguments without NaN and infinite numbers, and the outputs (B, T, D) that may attend these."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    rows: Tensor


def _any_up_to(x: Tensor, causal: bool, T: int) -> Tensor:
    """Return for each row (B, T, D) whether any token of x (B, S, D) up to it is set, or any token if not causal."""
    return x.cumsum(1, dtype=torch.int32) > 0 if causal else x.any(1, keepdim=True).expand(-1, T, -1)


def _any_from(x: Tensor, causal: bool, S: int) -> Tensor:
    """Return for each token (B, S, D) whether any row of x (B, T, D) from it on is set, or any row if not causal."""
    return x.flip(1).cumsum(1, dtype=torch.int32).flip(1) > 0 if causal else x.any(1, keepdim=True).expand(-1, S, -1)


def _heads(x: Tensor, heads: int) -> Tensor:
    """Return whether any feature of a head is set: (B, T, heads e) to (B, T, heads)."""
    return x.unflatten(-1, (heads, -1)).any(-1)


def _spread(x: Tensor, D: int) -> Tensor:
    """Repeat (B, T, heads) to (B, T, D)."""
    return x.repeat_interleave(D // x.shape[-1], -1)


def _nan_or_inf(x: Tensor) -> Tensor:
    return x.isnan() | (x == INF)


def remove_nonfinite(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    T: int,
    *,
    causal: bool,
    heads: int | None = None,
    weights: Tensor | None = None,
) -> Finite:
    """Remove NaN and infinite numbers of valid tokens, and find the rows that may attend them.

    Args:
        k: (B, S, D), or (B, S, h) with a key per head.
        heads: in attention by products of features, the number of heads that keys and queries are cut into; None where
            each feature, or key, stands alone.
        weights: (B or 1, T, 1 or D) rows whose own log-weights are NaN.
    """
    D, live = v.shape[-1], True if mask is None else mask[..., None]
    keys = _nan_or_inf(k) & live
    if heads is not None:
        keys = _spread(_heads(keys, heads), D)
    values = ~v.isfinite() & live
    rows = _any_up_to(_spread(keys, D) | values, causal, T)
    if weights is not None:
        rows = rows | weights
    if q is not None:
        own = q.isnan() if heads is None else _spread(_heads(_nan_or_inf(q), heads), D)
        q, rows = q.masked_fill(own, 0.0), rows | own
    return Finite(q, k.masked_fill(keys, -INF), v.masked_fill(values, 0.0), rows)


def without_weights(
    w: Tensor, w2: Tensor | None, mask: Tensor | None, *, causal: bool, before: int = 0
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Remove NaN from log-weights, and find the rows (B or Bw, T, 1) in which a NaN meets a valid key.

    Args:
        w, w2: log-weights (Bw, T, S) and None, or factors (Bw, T, r) and (Bw, S, r).
        before: rows of the causal form before the first of w.
    """
    S = w.shape[-1] if w2 is None else w2.shape[-2]
    live = torch.ones(1, S, dtype=torch.bool, device=w.device) if mask is None else mask
    if w2 is None:
        bad = w.isnan()
        seen = bad.tril(before) if causal else bad
        return w.masked_fill(bad, 0.0), None, seen.float() @ live[..., None].float() > 0
    own, other = (~a.isfinite().all(-1, keepdim=True) for a in (w, w2))
    rows = own & _any_up_to(live[..., None], causal, w.shape[-2]) | _any_up_to(
        other & live[..., None], causal, w.shape[-2]
    )
    return w.masked_fill(own, 0.0), w2.masked_fill(other, 0.0), rows


def spoilt_weights(dw: Tensor, dw2: Tensor, hot: Hot, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Write NaN into the gradients of ``without_weights``' arguments wherever NaN rows contribute to them.

    dw2 is empty where there are no factors.
    """
    rows, tokens = (a.any(-1) if dw.shape[0] > 1 else a.any(-1).any(0, keepdim=True) for a in (hot.rows, hot.tokens))
    if dw2.numel():
        return dw.masked_fill(rows[..., None], NAN), dw2.masked_fill(tokens[..., None], NAN)
    pairs = rows[..., None] & tokens[:, None]
    return dw.masked_fill(pairs.tril() if causal else pairs, NAN), dw2


class Hot(NamedTuple):
    """Where gradients are NaN: NaN rows (B, T, D) that receive a gradient, and tokens (B, S, D) that they may attend.

    g is the gradient of the outputs without these rows.
    """

    g: Tensor
    rows: Tensor
    tokens: Tensor


def find_nan_gradients(g: Tensor, rows: Tensor, mask: Tensor | None, S: int, *, causal: bool) -> Hot:
    """Find where a gradient g of the outputs meets NaN rows; a g that is not finite counts as such a row."""
    hot = (rows & (g != 0)) | ~g.isfinite()
    tokens = _any_from(hot, causal, S)
    return Hot(g.masked_fill(rows | hot, 0.0), hot, tokens if mask is None else tokens & mask[..., None])


def mark_gradients(grads: Sequence[Tensor], hot: Hot, *, heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv with NaN wherever NaN rows contribute to them."""
    dq, dk, dv = grads
    rows, keys, D = hot.rows, hot.tokens, dv.shape[-1]
    if heads is not None:
        rows, keys = (_spread(_heads(a, heads), D) for a in (rows, keys))
    elif dk.shape[-1] != D:
        keys = _heads(keys, dk.shape[-1])
    return dq.masked_fill(rows, NAN) if dq.numel() else dq, dk.masked_fill(keys, NAN), dv.masked_fill(hot.tokens, NAN)
