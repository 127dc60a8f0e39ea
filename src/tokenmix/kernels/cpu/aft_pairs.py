"""Run AFT-pairs on the C library, on tensors and without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from . import DTYPES, dense, function, new, pointer, rows
from .aft_forget import WIDEST
from .aft_simple import CHUNK, State

__all__ = ["WIDEST", "backward", "extend", "forward", "saved_shapes"]

_forward = function("pairs_forward", "iiiid" + "p" * 15 + "l" * 9 + "i")
_backward = function("pairs_backward", "iiiid" + "p" * 15 + "l" * 11 + "i")


def _strides(*tensors: Tensor | None) -> list[int]:
    return [n for a in tensors for n in ((0, 0) if a is None else a.stride()[:2])]


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
    saved = new(saved_shapes(q, k, v, a, b, d, mask, norm=norm, eps=eps)[0] if save else (0,))
    y = _run(q, k, v, a, b, d, mask, (None,) * 6, pointer(saved) if save else None, norm=norm, eps=eps)
    return y, saved


def _run(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    d: Tensor | None,
    mask: Tensor | None,
    states: tuple[int | None, ...],
    kept: int | None,
    *,
    norm: bool,
    eps: float,
) -> Tensor:
    q, k, v, mask = None if q is None else rows(q), rows(k), rows(v), dense(mask)
    a, b, d = a.contiguous(), dense(b), dense(d)
    y = new(k.shape, k.dtype)
    sizes = *k.shape, *_strides(q, k, v), torch.get_num_threads()
    given = *map(pointer, (q, k, v, a, b, d, mask, y)), kept
    _forward(DTYPES[k.dtype], a.shape[2], a.shape[3], int(norm), eps, *given, *states, *sizes)
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
    dk, dv = new(k.shape, k.dtype), new(k.shape, k.dtype)
    dq = new((0,) if q is None else q.shape, k.dtype)
    da, db, dd = (new((0,) if x is None else x.shape) for x in (a, b, d))
    arrays = map(pointer, (q, k, v, a, b, d, mask, g, saved, dq, dk, dv, da, db, dd))
    sizes = *k.shape, *_strides(q, k, v, g), torch.get_num_threads()
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
    after = tuple(new(x.shape, torch.float64) for x in past)
    states = *map(pointer, before), *map(pointer, after)
    return _run(q, k, v, a, b, d, mask, states, None, norm=norm, eps=eps), after  # type: ignore[return-value]  # there are three
