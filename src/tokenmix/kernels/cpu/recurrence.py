"""Run gated linear recurrences on the C library, on tensors and without autograd."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ...errors import MixerError
from . import dense, empty_result, function, pointers, rows

WIDEST = 256
"""Most features of a key and of a value: REC_D of recurrence.c."""
GROUP = 64
"""Tokens between two states that are kept for the backward pass: REC_C * REC_GROUP of recurrence.c."""
LIVE, START = 1, 2
"""Bits of ``flags``: the token changes the state; it starts a document, with an empty one."""

_FIELDS = struct.Struct("9qd8q9q4q2q6q").pack
_forward = function("recurrence_forward", "s")
_backward = function("recurrence_backward", "s")

Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def result_shape(*given: Tensor | None, delta: bool, scale: float) -> tuple[int]:
    """Return how many numbers outputs and states have together, for the inputs of ``forward``."""
    _, k, v, *_, ends = given
    (B, T, H, V), K = v.shape, k.shape[3]  # type: ignore[union-attr]  # k and v are tensors
    return (B * T * H * V + _documents(B, ends) * H * K * V,)


def saved_shapes(*given: Tensor | None, delta: bool, scale: float) -> list[tuple[int, ...]]:
    """Return the shapes of what is saved: v less what the state held, and the states before each group of tokens."""
    _, k, v, *_, ends = given
    (B, T, H, V), K = v.shape, k.shape[3]  # type: ignore[union-attr]  # k and v are tensors
    slots = B * -(-T // GROUP) if ends is None else T // GROUP + ends.shape[0] - 1
    return [(B, T, H, V) if delta else (0,), (slots, H, K, V)]


def _documents(rows: int, ends: Tensor | None) -> int:
    return rows if ends is None else ends.shape[0] - 1


def _check_ends(v: Tensor, ends: Tensor | None) -> None:
    """Refuse ends of documents that would lead out of the row."""
    if ends is not None and (int(ends[0]) != 0 or int(ends[-1]) != v.shape[1] or bool((ends.diff() < 0).any())):
        raise MixerError(f"recurrence: the ends of documents must rise from 0 to {v.shape[1]}, the number of tokens.")


def _pack(given: Given, results: list[int | None], *, delta: bool, scale: float) -> bytes:
    """Return the fields of a call: ``given`` with dense last dimensions, and the 12 pointers after the strides."""
    q, k, v, decay, beta, past, flags, ends = given
    (_, T, H, V), (HK, K) = v.shape, k.shape[2:]
    kind = 0 if decay is None else 1 if decay.shape[3] == 1 else 2
    sizes = int(delta), kind, _documents(v.shape[0], ends), T, H, HK, K, V, torch.get_num_threads()
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    inputs = [a or 0 for a in pointers(q, k, v, decay, beta, past, flags, ends)]
    return _FIELDS(*sizes, scale, *inputs, *strides, *(a or 0 for a in results))


def _dense(given: Given) -> Given:
    q, k, v, *rest = given
    a, b, c, d, e = (dense(x) for x in rest)
    return rows(q), rows(k), rows(v), a, b, c, d, e


def forward(*given: Tensor | None, delta: bool, scale: float, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs (B, T, H, V) and states (documents, H, K, V) in one row, and the tensors that are saved.

    Args:
        given: q, k (B, T, heads, K), v (B, T, H, V), decay (B, T, H, 1 or K), beta (B, T, H), past (documents, H, K,
            V), flags (B, T) and ends (documents + 1,), each of the last five or None.
        delta: whether a delta rule corrects the state.
        scale: factor of the outputs.
    """
    _check_ends(given[2], given[7])  # type: ignore[arg-type]  # v is a tensor
    q, k, v, *rest = _dense(given)  # type: ignore[arg-type]  # as many as declared
    all_of: Given = (q, k, v, *rest)  # type: ignore[assignment]  # as many as declared
    result = empty_result(result_shape(*all_of, delta=delta, scale=scale))
    u, starts = (empty_result(a if save else (0,)) for a in saved_shapes(*all_of, delta=delta, scale=scale))
    kept = [u if save and delta else None, starts if save else None]
    wanted = pointers(result, result[v.numel() :], *kept)
    _forward(_pack(all_of, [*wanted, *[0] * 8], delta=delta, scale=scale))
    return result, u, starts


def backward(g: Tensor, *given: Tensor | None, delta: bool, scale: float) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, decay, beta and past, empty for those that are None.

    Args:
        g: of outputs and states, in one row.
        given: the inputs of ``forward``, and what it saved.
    """
    inputs, (u, starts) = given[:8], given[8:]
    _check_ends(inputs[2], inputs[7])  # type: ignore[arg-type]  # v is a tensor
    all_of, g = _dense(inputs), g.contiguous()  # type: ignore[arg-type]  # as many as declared
    found = [None if a is None else empty_result(a.shape) for a in all_of[:6]]
    kept = pointers(u if delta else None, starts, g, g[all_of[2].numel() :])
    _backward(_pack(all_of, [0, 0, *kept, *pointers(*found)], delta=delta, scale=scale))
    return tuple(g.new_empty(0) if a is None else a for a in found)
