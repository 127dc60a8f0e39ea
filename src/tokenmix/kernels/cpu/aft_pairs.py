"""Run AFT-pairs on the C library, on tensors and without autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import DTYPES, dense, empty_result, function, pointers, rows, strides
from .aft_forget import WIDEST
from .aft_simple import CHUNK, State

__all__ = ["WIDEST", "backward", "extend", "forward", "saved_shapes"]

_forward = function("pairs_forward", "iiiid" + "p" * 15 + "l" * 9 + "i")
_backward = function("pairs_backward", "iiiid" + "p" * 15 + "l" * 11 + "i")


def saved_shapes(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    mask: Tensor | None,
    *,
    norm: bool,
    eps: float,
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides its inputs."""
    B, T, D = k.shape
    return [(B, -(-T // CHUNK), a.shape[3], 4, D)]


def forward(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    mask: Tensor | None,
    *,
    norm: bool,
    eps: float,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D), and the tensor saved for the backward pass (empty unless ``save``). a, b, d are float32."""
    saved = empty_result(saved_shapes(q, k, v, a, b, d, mask, norm=norm, eps=eps)[0] if save else (0,))
    y = _run(q, k, v, a, b, d, mask, saved if save else None, (None,) * 6, norm=norm, eps=eps)
    return y, saved


def _run(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    mask: Tensor | None,
    kept: Tensor | None,
    states: Sequence[Tensor | None],
    *,
    norm: bool,
    eps: float,
) -> Tensor:
    q, k, v, mask = None if q is None else rows(q), rows(k), rows(v), dense(mask)
    a, b, d = a.contiguous(), dense(b), dense(d)
    y = empty_result(k.shape, k.dtype)
    sizes = *k.shape, *strides(q, k, v), torch.get_num_threads()
    given = pointers(q, k, v, a, b, d, mask, y, kept, *states)
    _forward(DTYPES[k.dtype], a.shape[2], a.shape[3], int(norm), eps, *given, *sizes)
    return y


def backward(
    g: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    mask: Tensor | None,
    saved: Tensor,
    *,
    norm: bool,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return dq, dk, dv, da, db, dd, empty for what was None."""
    g, q, k, v, mask = rows(g), None if q is None else rows(q), rows(k), rows(v), dense(mask)
    a, b, d = a.contiguous(), dense(b), dense(d)
    dk, dv = empty_result(k.shape, k.dtype), empty_result(k.shape, k.dtype)
    dq = empty_result((0,) if q is None else q.shape, k.dtype)
    da, db, dd = (empty_result((0,) if x is None else x.shape) for x in (a, b, d))
    arrays = pointers(q, k, v, a, b, d, mask, g, saved, dq, dk, dv, da, db, dd)
    sizes = *k.shape, *strides(q, k, v, g), torch.get_num_threads()
    _backward(DTYPES[k.dtype], a.shape[2], a.shape[3], int(norm), eps, *arrays, *sizes)
    return dq, dk, dv, da, db, dd


def extend(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    mask: Tensor | None,
    past: State,
    *,
    norm: bool,
    eps: float,
) -> tuple[Tensor, State]:
    """Continue with new tokens after ``past`` (m, num, den (B, R, D) in float64).

    Returns the outputs and the sums after these tokens.
    """
    before = [x.contiguous() for x in past]  # kept alive until the call
    after = tuple(empty_result(x.shape, torch.float64) for x in past)
    return _run(q, k, v, a, b, d, mask, None, (*before, *after), norm=norm, eps=eps), after  # type: ignore[return-value]  # there are three
