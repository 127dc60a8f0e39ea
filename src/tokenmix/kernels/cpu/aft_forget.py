"""Run AFT-forget on the C library, on tensors and without autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import DTYPES, dense, empty_result, function, pointers, rows, strides
from .aft_simple import CHUNK, State, empty_state

WIDEST = 512
"""Most features of a head that the kernels normalise: SCAN_W of aft_simple.c."""

_forward = function("fade_forward", "iid" + "p" * 13 + "l" * 11 + "i")
_backward = function("fade_backward", "iid" + "p" * 15 + "l" * 13 + "i")


def saved_shapes(
    q: Tensor | None, k: Tensor, v: Tensor, d: Tensor, mask: Tensor | None, *, heads: int, eps: float
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides its inputs."""
    B, T, D = k.shape
    return [(B, -(-T // CHUNK), 4, D)]


def forward(
    q: Tensor | None, k: Tensor, v: Tensor, d: Tensor, mask: Tensor | None, *, heads: int, eps: float, save: bool
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D), and the tensor saved for the backward pass (empty unless ``save``); heads=0: no norm."""
    q, k, v, d, mask = None if q is None else rows(q), rows(k), rows(v), rows(d), dense(mask)
    y = empty_result(k.shape, k.dtype)
    saved = empty_result(saved_shapes(q, k, v, d, mask, heads=heads, eps=eps)[0] if save else (0,))
    given = pointers(q, k, v, d, mask, y, saved if save else None)
    states = (None,) * 6
    sizes = *k.shape, *strides(q, k, v, d), torch.get_num_threads()
    _forward(DTYPES[k.dtype], heads, eps, *given, *states, *sizes)
    return y, saved


def backward(
    g: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    d: Tensor,
    mask: Tensor | None,
    saved: Tensor,
    *,
    heads: int,
    eps: float,
    after: tuple[Tensor | None, ...] = (None, None),
    before: tuple[Tensor | None, ...] = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq (empty without q), dk, dv, dd.

    Args:
        after: the gradients of num and den (B, D) after the tokens, in float64 and contiguous.
        before: room for those before them.
    """
    g, q, k, v, d, mask = rows(g), None if q is None else rows(q), rows(k), rows(v), rows(d), dense(mask)
    dk, dv, dd = (empty_result(k.shape, k.dtype) for _ in range(3))
    dq = empty_result((0,) if q is None else q.shape, k.dtype)
    arrays = pointers(q, k, v, d, mask, g, saved, *after, dq, dk, dv, dd, *before)
    sizes = *k.shape, *strides(q, k, v, d, g), torch.get_num_threads()
    _backward(DTYPES[k.dtype], heads, eps, *arrays, *sizes)
    return dq, dk, dv, dd


def extend(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    d: Tensor,
    mask: Tensor | None,
    past: State,
    *,
    heads: int = 0,
    eps: float = 0.0,
    save: bool = False,
) -> tuple[Tensor, State, tuple[Tensor, ...]]:
    """Continue with new tokens after ``past`` (m, num, den in float64).

    Returns the outputs, the sums after these tokens, and what ``extend_backward`` needs (empty unless ``save``).
    """
    q, k, v, d, mask = None if q is None else rows(q), rows(k), rows(v), rows(d), dense(mask)
    before = [a.contiguous() for a in past]  # kept alive until the call
    B, T, D = k.shape
    y, after = empty_result((B, T, D), k.dtype), empty_state(B, D)
    saved = empty_result(saved_shapes(q, k, v, d, mask, heads=heads, eps=eps)[0] if save else (0,))
    given = pointers(q, k, v, d, mask, y, saved if save else None, *before, *after)
    _forward(DTYPES[k.dtype], heads, eps, *given, B, T, D, *strides(q, k, v, d), torch.get_num_threads())
    return y, after, (saved,) if save else ()


def extend_backward(
    g: Tensor,
    g_sums: Sequence[Tensor],
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    d: Tensor,
    mask: Tensor | None,
    past: State,
    kept: Sequence[Tensor],
    *,
    heads: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return dq (empty without q), dk, dv, dd, and the gradients of num and den before the tokens (B, D).

    Args:
        g, g_sums: the gradients of the outputs, and in float64 of num and den after the tokens.
    """
    before = empty_result(past[1].shape, torch.float64), empty_result(past[2].shape, torch.float64)
    after = tuple(a.contiguous() for a in g_sums)
    return *backward(g, q, k, v, d, mask, kept[0], heads=heads, eps=eps, after=after, before=before), *before
