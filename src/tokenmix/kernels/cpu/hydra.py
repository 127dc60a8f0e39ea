"""Run Hydra attention on the C library, on tensors and without autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..counts import mean_scale
from . import DTYPES, empty_result, function, pointers, rows, strides

BLOCK = 64  # HYDRA_T of hydra.c

_HEAD = "iiid" + "p" * 5
_forward = function("hydra_forward", _HEAD + "p" * 4 + "l" * 9 + "i")
_backward = function("hydra_backward", _HEAD + "p" * 7 + "l" * 11 + "i")
_all_forward = function("hydra_all_forward", _HEAD + "p" * 3 + "l" * 10 + "i")
_all_backward = function("hydra_all_backward", _HEAD + "p" * 5 + "l" * 12 + "i")


def _sums_shape(k: Tensor, causal: bool) -> tuple[int, ...]:
    """Return the shape of the sum before each block, or the sum over all keys."""
    B, S, D = k.shape
    return (B, -(-S // BLOCK), D) if causal else (B, 1, D)


def saved_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    of_q: bool,
    of_k: bool,
    eps: float,
    mean: bool,
) -> list[tuple[int, ...]]:
    """Return the shape of the tensor saved for the backward pass besides its inputs."""
    return [_sums_shape(k, causal)]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    of_q: bool,
    of_k: bool,
    eps: float,
    mean: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D), and the tensor saved for the backward pass (empty unless ``save``).

    Args:
        of_q, of_k: whether queries, keys, are divided by their norm, with ``eps`` under the root.
        mean: whether the sum is divided by the number of keys that may be attended.
    """
    q, k, v = rows(q), rows(k), rows(v)
    (B, T, D), S = q.shape, k.shape[1]
    mask = None if mask is None else mask.contiguous()
    scale = mean_scale(mask, q, S, causal) if mean else None
    y, saved = empty_result((B, T, D), k.dtype), empty_result(_sums_shape(k, causal))
    fixed = DTYPES[k.dtype], int(of_q), int(of_k), eps, *pointers(q, k, v, mask, scale)
    if causal:
        _forward(*fixed, *pointers(y, saved), None, None, B, T, D, *strides(q, k, v), torch.get_num_threads())
    else:
        part = empty_result(_sums_shape(k, True))
        _all_forward(*fixed, *pointers(y, part, saved), B, T, S, D, *strides(q, k, v), torch.get_num_threads())
    return y, saved if save else saved.new_empty(0)


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    saved: Tensor,
    *,
    causal: bool,
    of_q: bool,
    of_k: bool,
    eps: float,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv."""
    g, q, k, v = rows(g), rows(q), rows(k), rows(v)
    (B, T, D), S = q.shape, k.shape[1]
    mask = None if mask is None else mask.contiguous()
    scale = mean_scale(mask, q, S, causal) if mean else None
    dq, dk, dv = (empty_result(a.shape, k.dtype) for a in (q, k, v))
    fixed = DTYPES[k.dtype], int(of_q), int(of_k), eps, *pointers(q, k, v, mask, scale, g, saved, dq, dk, dv)
    run, sizes = (_backward, (None, None, B, T, D)) if causal else (_all_backward, (B, T, S, D))
    run(*fixed, *sizes, *strides(q, k, v, g), torch.get_num_threads())
    return dq, dk, dv


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past: Sequence[Tensor],
    *,
    cosine: bool,
    eps: float,
    scale: Tensor | None,
    save: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Continue the causal form with new tokens.

    Returns the outputs, the past after these tokens, and what ``extend_backward`` needs (empty unless ``save``).

    Args:
        past: a unit that is not read, and in float64 the sum (B, D) over all keys before.
        cosine: whether queries and keys are divided by their norm.
        scale: (B, T), a factor for each output.
    """
    q, k, v = rows(q), rows(k), rows(v)
    (B, T, D), before = q.shape, past[1].contiguous()
    y, part, after = (
        empty_result((B, T, D), k.dtype),
        empty_result(_sums_shape(k, True)),
        empty_result((B, D), torch.float64),
    )
    given = pointers(q, k, v, mask, scale, y, part, before, after)
    _forward(
        DTYPES[k.dtype], int(cosine), int(cosine), eps, *given, B, T, D, *strides(q, k, v), torch.get_num_threads()
    )
    return y, (past[0], after), (part,) if save else ()


def extend_backward(
    g: Tensor,
    g_sums: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past: Sequence[Tensor],
    kept: Sequence[Tensor],
    *,
    cosine: bool,
    eps: float,
    scale: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return dq, dk, dv, and the gradient of the sum before the tokens; g_sums is that of the sum after them."""
    g, q, k, v = rows(g), rows(q), rows(k), rows(v)
    (B, T, D), after = q.shape, g_sums[0].contiguous()
    *found, before = *(empty_result(a.shape, k.dtype) for a in (q, k, v)), empty_result((B, D), torch.float64)
    given = pointers(q, k, v, mask, scale, g, kept[0], *found, after, before)
    sizes = B, T, D, *strides(q, k, v, g), torch.get_num_threads()
    _backward(DTYPES[k.dtype], int(cosine), int(cosine), eps, *given, *sizes)
    return *found, before
