"""Run linear attention on the C library, on tensors and without autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import DTYPES, empty_result, function, pointers, rows, strides
from .nonfinite import NAN, Alarm, alarm_address, find_nan_gradients, is_marked, mark, mark_gradients, remove_nonfinite

BLOCK = 64  # LINEAR_T of linear.c
NOTHING = (None,) * 4

Sums = tuple[Tensor, Tensor]  # m (B, H, e), acc (B, H, e + 1, e), in float64

_forward = function("linear_forward", "ii" + "p" * 10 + "l" * 10 + "ip")
_backward = function("linear_backward", "ii" + "p" * 14 + "l" * 12 + "i")
_all_forward = function("linear_all_forward", "ii" + "p" * 6 + "l" * 11 + "ip")
_all_backward = function("linear_all_backward", "ii" + "p" * 10 + "l" * 13 + "i")


def _saved_shape(q: Tensor, heads: int, causal: bool) -> tuple[int, ...]:
    """Return the shape of denominators, and causal also which blocks were done token by token."""
    B, T = q.shape[:2]
    return B, heads, T + (-(-T // BLOCK) if causal else 0)


def _sizes(q: Tensor, k: Tensor, heads: int, causal: bool) -> tuple[int, ...]:
    B, T, D = q.shape
    return (B, T, heads, D // heads) if causal else (B, T, k.shape[1], heads, D // heads)


def saved_shapes(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, heads: int, elu: bool, causal: bool
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides inputs and outputs."""
    return [_saved_shape(q, heads, causal)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, heads: int, elu: bool, causal: bool, save: bool
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, H e), and the tensor saved for the backward pass (empty unless ``save``).

    The features are elu + 1 of q and k, or exp of them.
    """
    alarm = Alarm()
    y, saved = _run(q, k, v, mask, alarm, heads=heads, elu=elu, causal=causal)
    if alarm:
        rest = remove_nonfinite(q, k, v, mask, q.shape[1], causal=causal, heads=heads)
        assert rest.q is not None
        y = _run(rest.q, rest.k, rest.v, mask, None, heads=heads, elu=elu, causal=causal)[0].masked_fill_(
            rest.rows, NAN
        )
        mark(saved)
    return y, saved if save else saved.new_empty(0)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    alarm: Alarm | None,
    *,
    heads: int,
    elu: bool,
    causal: bool,
    sums: Sequence[Tensor | None] = NOTHING,
) -> tuple[Tensor, Tensor]:
    """Return y and the tensor saved for backward; ``sums``: those before the tokens, and room for those after them."""
    q, k, v = rows(q), rows(k), rows(v)
    mask = None if mask is None else mask.contiguous()
    y, saved = empty_result(q.shape, q.dtype), empty_result(_saved_shape(q, heads, causal))
    run = _forward if causal else _all_forward
    arrays = pointers(q, k, v, mask, y, saved, *(sums if causal else ()))
    run(
        DTYPES[q.dtype],
        int(elu),
        *arrays,
        *_sizes(q, k, heads, causal),
        *strides(q, k, v),
        torch.get_num_threads(),
        alarm_address(alarm),
    )
    return y, saved


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    y: Tensor,
    saved: Tensor,
    *,
    heads: int,
    elu: bool,
    causal: bool,
    sums: Sequence[Tensor | None] = NOTHING,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv.

    Args:
        sums: of the causal form, those before the tokens, the gradient of acc after them, and room for that before.
    """
    if is_marked(saved):
        return _backward_without(g, q, k, v, mask, heads=heads, elu=elu, causal=causal)
    g, q, k, v, y = rows(g), rows(q), rows(k), rows(v), y.contiguous()
    mask = None if mask is None else mask.contiguous()
    dq, dk, dv = (empty_result(a.shape, q.dtype) for a in (q, k, v))
    run = _backward if causal else _all_backward
    arrays = pointers(q, k, v, mask, y, saved, g, dq, dk, dv, *(sums if causal else ()))
    run(DTYPES[q.dtype], int(elu), *arrays, *_sizes(q, k, heads, causal), *strides(q, k, v, g), torch.get_num_threads())
    return dq, dk, dv


def _backward_without(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, heads: int, elu: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rest = remove_nonfinite(q, k, v, mask, q.shape[1], causal=causal, heads=heads)
    assert rest.q is not None
    hot = find_nan_gradients(g, rest.rows, mask, k.shape[1], causal=causal)
    y, saved = _run(rest.q, rest.k, rest.v, mask, None, heads=heads, elu=elu, causal=causal)
    grads = backward(hot.g, rest.q, rest.k, rest.v, mask, y, saved, heads=heads, elu=elu, causal=causal)
    return mark_gradients(grads, hot, heads=heads)


def extend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, past: Sums, *, elu: bool, save: bool = False
) -> tuple[Tensor, Sums, tuple[Tensor, ...]] | None:
    """Continue the causal form with new tokens after ``past``.

    Returns the outputs, the sums after these tokens, and what ``extend_backward`` needs besides (empty unless
    ``save``); None where an output is not finite.
    """
    before, alarm, heads = [a.contiguous() for a in past], Alarm(), past[0].shape[1]
    after = empty_result(before[0].shape, torch.float64), empty_result(before[1].shape, torch.float64)
    y, saved = _run(q, k, v, mask, alarm, heads=heads, elu=elu, causal=True, sums=(*before, *after))
    return None if alarm else (y, after, (y, saved) if save else ())


def extend_backward(
    g: Tensor,
    g_sums: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past: Sums,
    kept: Sequence[Tensor],
    *,
    elu: bool,
) -> tuple[Tensor, ...]:
    """Return dq, dk, dv, and the gradient of acc before the tokens.

    Args:
        g, g_sums: the gradients of the outputs, and in float64 of acc after the tokens.
    """
    before, after = [a.contiguous() for a in past], g_sums[0].contiguous()
    of_past = empty_result(after.shape, torch.float64)
    options = {"heads": past[0].shape[1], "elu": elu, "causal": True, "sums": (*before, after, of_past)}
    return *backward(g, q, k, v, mask, *kept, **options), of_past  # type: ignore[arg-type]  # of several types
