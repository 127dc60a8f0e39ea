"""Run AFT-simple on the C library, on tensors and without autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import DTYPES, dense, empty_result, function, pointers, rows, strides

CHUNK = 64  # SCAN_T of aft_simple.c

_forward = function("scan_forward", "ii" + "p" * 12 + "l" * 9 + "i")
_backward = function("scan_backward", "ii" + "p" * 13 + "l" * 11 + "i")
_all_forward = function("scan_all_forward", "ii" + "p" * 6 + "l" * 10 + "i")
_all_backward = function("scan_all_backward", "ii" + "p" * 9 + "l" * 12 + "i")

State = tuple[Tensor, Tensor, Tensor]


def empty_state(B: int, D: int) -> State:
    """Return room for sums m, num and den (B, D) in float64."""
    sums = torch.empty(B, D, dtype=torch.float64, device="cpu")
    return sums, torch.empty_like(sums), torch.empty_like(sums)


def saved_shapes(
    q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, *, T: int, causal: bool
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides its inputs."""
    B, S, D = k.shape
    return [(B, -(-S // CHUNK), 3, D) if causal else (B, 1, 3, D)]


def forward(
    q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, *, T: int, causal: bool, save: bool
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D), and the tensor saved for the backward pass (empty unless ``save``)."""
    q, k, v, mask = None if q is None else rows(q), rows(k), rows(v), dense(mask)
    B, S, D = k.shape
    y = empty_result((B, T, D), k.dtype)
    saved = empty_result(saved_shapes(q, k, v, mask, T=T, causal=causal)[0] if save else (0,))
    fixed = DTYPES[k.dtype], int(q is not None), *pointers(q, k, v, mask, y, saved if save else None)
    if causal:
        _forward(*fixed, None, None, None, None, None, None, B, T, D, *strides(q, k, v), torch.get_num_threads())
    else:
        _all_forward(*fixed, B, T, S, D, *strides(q, k, v), torch.get_num_threads())
    return y, saved


def backward(
    g: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    saved: Tensor,
    *,
    T: int,
    causal: bool,
    after: tuple[Tensor | None, ...] = (None, None),
    before: tuple[Tensor | None, ...] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq (empty without q), dk, dv.

    Args:
        after: of the causal form, the gradients of num and den (B, D) after the tokens, in float64 and contiguous.
        before: room for those before them.
    """
    g, q, k, v, mask = rows(g), None if q is None else rows(q), rows(k), rows(v), dense(mask)
    B, S, D = k.shape
    dk, dv = (empty_result(k.shape, k.dtype) for _ in range(2))
    dq = empty_result((0,) if q is None else q.shape, k.dtype)
    fixed = (
        DTYPES[k.dtype],
        int(q is not None),
        *pointers(q, k, v, mask, g, saved),
    )
    rest = *strides(q, k, v, g), torch.get_num_threads()
    if causal:
        _backward(*fixed, *pointers(*after, dq, dk, dv, *before), B, S, D, *rest)
    else:
        _all_backward(*fixed, *pointers(dq, dk, dv), B, T, S, D, *rest)
    return dq, dk, dv


def extend(
    q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, past: State, *, save: bool = False
) -> tuple[Tensor, State, tuple[Tensor, ...]]:
    """Continue the causal form with new tokens after ``past`` (m, num, den in float64).

    Returns the outputs, the sums after these tokens, and what ``extend_backward`` needs (empty unless ``save``).
    """
    q, k, v, mask = None if q is None else rows(q), rows(k), rows(v), dense(mask)
    before = [a.contiguous() for a in past]  # kept alive until the call
    B, T, D = k.shape
    y, after = empty_result((B, T, D), k.dtype), empty_state(B, D)
    saved = empty_result(saved_shapes(q, k, v, mask, T=T, causal=True)[0] if save else (0,))
    given = pointers(q, k, v, mask, y, saved if save else None, *before, *after)
    _forward(DTYPES[k.dtype], int(q is not None), *given, B, T, D, *strides(q, k, v), torch.get_num_threads())
    return y, after, (saved,) if save else ()


def extend_backward(
    g: Tensor,
    g_sums: Sequence[Tensor],
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past: State,
    kept: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return dq (empty without q), dk, dv, and the gradients of num and den before the tokens (B, D).

    Args:
        g, g_sums: the gradients of the outputs, and in float64 of num and den after the tokens.
    """
    before = empty_result(past[1].shape, torch.float64), empty_result(past[2].shape, torch.float64)
    after = tuple(a.contiguous() for a in g_sums)
    options = {"T": k.shape[1], "causal": True, "after": after, "before": before}
    return *backward(g, q, k, v, mask, kept[0], **options), *before  # type: ignore[arg-type]  # of several types
