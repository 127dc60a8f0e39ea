"""Extend states by a few tokens on the C library, on tensors and without autograd.

These functions run for every token that a model generates, so each wrapper makes one call of the library with one
packed struct, and does as little else as possible. All arguments are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from . import DTYPES, function

Sums = tuple[Tensor, Tensor, Tensor]
Kept = tuple[Tensor, Tensor, Tensor]


def _plain_new(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


# it takes half the time of torch.empty
_new: Callable[..., Tensor] = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cpu", _plain_new)
_DOUBLE = torch.float64


def _kernel(name: str, fields: str) -> tuple[Callable[..., bytes], Callable[[bytes], None]]:
    return Struct(fields).pack, function(name, "s")


_simple_fields, _simple = _kernel("step_simple", "15q")
_ring_fields, _ring = _kernel("step_ring", "29q")
_full = function("step_full", "s")
_pairs_fields, _pairs = _kernel("step_pairs", "17q")
_taps_fields, _taps = _kernel("step_taps", "12q")
_conv_fields, _conv = _kernel("step_conv", "17q")
_hydra_fields, _hydra = _kernel("step_hydra", "3qd12q")
_linear_fields, _linear = _kernel("step_linear", "14q")


def _at(a: Tensor | None) -> int:
    return 0 if a is None else a.data_ptr()


def simple(q: Tensor | None, k: Tensor, v: Tensor, live: Tensor | None, past: Any) -> tuple[Tensor, Sums]:
    """Extend AFT-simple by L tokens (B, L, D) after the sums ``past``, which are m, num, den (B, D).

    Returns the outputs, and the sums after these tokens.
    """
    B, L, D = k.shape
    m, num, den = past
    y = _new((B, L, D), (L * D, D, 1), k.dtype)
    m1, num1, den1 = _new((B, D), (D, 1), _DOUBLE), _new((B, D), (D, 1), _DOUBLE), _new((B, D), (D, 1), _DOUBLE)
    _simple(
        _simple_fields(
            DTYPES[k.dtype],
            0 if q is None else q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            0 if live is None else live.data_ptr(),
            m.data_ptr(),
            num.data_ptr(),
            den.data_ptr(),
            y.data_ptr(),
            m1.data_ptr(),
            num1.data_ptr(),
            den1.data_ptr(),
            B,
            L,
            D,
        )
    )
    return y, (m1, num1, den1)


def ring(
    q: Tensor | None, new: Kept, kept: Kept, far: Sums, w: Tensor, near: Tensor | None, *, heads: bool
) -> tuple[Tensor, Kept, Sums]:
    """Let L new tokens attend the last R keys, each other, and the sums of all older keys.

    Args:
        new, kept: keys (B, L or R, h), values (B, L or R, D), and which tokens are valid (B, L or R).
        w: log-weights (B or 1, h or 1, L, R + L), float64; token t reads t .. R + t of its row.
        near: (B or 1, 1, L, R + L), the only pairs that count; the sums are then left unchanged.
        heads: one key for all features of a head; otherwise h = D.

    Returns:
        The outputs, the last R of all tokens, and the sums of those before.
    """
    k, v, live = new
    keys, values, lives = kept
    (B, L, D), (_, R, h), dtype = v.shape, keys.shape, v.dtype
    y, keys1, values1 = (
        _new((B, L, D), (L * D, D, 1), dtype),
        _new((B, R, h), (R * h, h, 1), dtype),
        _new((B, R, D), (R * D, D, 1), dtype),
    )
    lives1 = _new((B, R), (R, 1), torch.bool)
    m, num, den = far
    m1, num1, den1 = (
        far
        if near is not None
        else (_new((B, h), (h, 1), _DOUBLE), _new((B, D), (D, 1), _DOUBLE), _new((B, h), (h, 1), _DOUBLE))
    )
    rows, per_head, _, _ = w.shape
    _ring(
        _ring_fields(
            DTYPES[dtype],
            heads,
            0 if q is None else q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            live.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            lives.data_ptr(),
            m.data_ptr(),
            num.data_ptr(),
            den.data_ptr(),
            w.data_ptr(),
            0 if near is None else near.data_ptr(),
            y.data_ptr(),
            keys1.data_ptr(),
            values1.data_ptr(),
            lives1.data_ptr(),
            m1.data_ptr(),
            num1.data_ptr(),
            den1.data_ptr(),
            B,
            L,
            R,
            D,
            h,
            w.stride(0) if rows > 1 else 0,
            w.stride(1) if per_head > 1 else 0,
            0 if near is None or near.shape[0] == 1 else near.stride(0),
        )
    )
    return y, (keys1, values1, lives1), (m1, num1, den1)


def pairs(
    u: Tensor, v: Tensor | None, at: Tensor, places: Tensor, *, window: int | None, keep: int
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Compute the log-weights of new tokens for the kept ones and each other.

    Args:
        u, v: the factors (rows, rank) and (cols, rank), or the table (rows, cols) and None.
        at, places: the positions (B, L) of new tokens and (B, R) of kept ones.

    Returns:
        The log-weights (B, 1, L, R + L), which of these pairs lie inside the window, and the last ``keep`` positions;
        None if a position lies outside the bias.
    """
    (B, L), R, (rows, rank) = at.shape, places.shape[1], u.shape
    S, cols = R + L, rank if v is None else v.shape[0]
    w, after, fault = (
        _new((B, 1, L, S), (L * S, L * S, S, 1), _DOUBLE),
        _new((B, keep), (keep, 1), torch.int64),
        _new((1,), (1,), torch.int64),
    )
    near = None if window is None else _new((B, 1, L, S), (L * S, L * S, S, 1), torch.bool)
    _pairs(
        _pairs_fields(
            DTYPES[u.dtype],
            u.data_ptr(),
            0 if v is None else v.data_ptr() or u.data_ptr(),
            at.data_ptr(),
            places.data_ptr(),
            w.data_ptr(),
            0 if near is None else near.data_ptr(),
            after.data_ptr(),
            fault.data_ptr(),
            B,
            L,
            R,
            rows,
            cols,
            rank,
            -1 if window is None else window,
            keep,
        )
    )
    return None if fault.item() else (w, near, after)


def taps(kernel: Tensor, at: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log-weights that a filter (h, s) gives new tokens for the kept ones and each other.

    The positions are ``at`` (B, L) of new tokens and ``places`` (B, R) of kept ones. Returns the log-weights
    (B, h, L, R + L), which of these pairs the filter reaches (B, 1, L, R + L), and the last R positions.
    """
    (B, L), R, (h, size) = at.shape, places.shape[1], kernel.shape
    S = R + L
    w, near = (
        _new((B, h, L, S), (h * L * S, L * S, S, 1), _DOUBLE),
        _new((B, 1, L, S), (L * S, L * S, S, 1), torch.bool),
    )
    after = _new((B, R), (R, 1), torch.int64)
    found = [a.data_ptr() for a in (kernel, at, places, w, near, after)]
    _taps(_taps_fields(DTYPES[kernel.dtype], *found, B, L, R, h, size))
    return w, near, after


def conv(weight: Tensor, new: Kept, kept: Kept) -> tuple[Tensor, Kept]:
    """Convolve L new tokens, feature by feature, with the last R before them, by their positions.

    Args:
        weight: (D, s), in the dtype of the tokens.
        new, kept: tokens (B, L or R, D), which of them are valid (B, L or R), and their positions (B, L or R), int64.

    Returns:
        The outputs (B, L, D), and the last R of all tokens.
    """
    (B, L, D), R = new[0].shape, kept[0].shape[1]
    y, values = _new((B, L, D), (L * D, D, 1), weight.dtype), _new((B, R, D), (R * D, D, 1), weight.dtype)
    valid, places = _new((B, R), (R, 1), torch.bool), _new((B, R), (R, 1), torch.int64)
    (x, live, at), (old, lives, before) = new, kept
    found = [a.data_ptr() for a in (weight, x, old, live, lives, at, before, y, values, valid, places)]
    _conv(_conv_fields(DTYPES[weight.dtype], *found, B, L, R, D, weight.shape[1]))
    return y, (values, valid, places)


def full(q: Tensor | None, new: Kept, kept: Kept, w: Tensor) -> Tensor:
    """Let L new tokens attend R kept keys and each other, causally: (B, L, D). w is (B or 1, 1, L, R + L), float64."""
    B, L, D = new[1].shape
    y = _new((B, L, D), (L * D, D, 1), new[1].dtype)
    inputs = [a.data_ptr() for a in (*new, *kept)]
    wb = w.stride(0) if w.shape[0] > 1 else 0
    _full(
        _ring_fields(
            DTYPES[y.dtype],
            0,
            _at(q),
            *inputs,
            0,
            0,
            0,
            w.data_ptr(),
            0,
            y.data_ptr(),
            *[0] * 6,
            B,
            L,
            kept[0].shape[1],
            D,
            D,
            wb,
            0,
            0,
        )
    )
    return y


def hydra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    live: Tensor | None,
    past: tuple[Tensor, Tensor],
    *,
    cosine: bool,
    mean: bool,
    eps: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Extend Hydra by L tokens (B, L, D) after ``past``, the sums (B, D) and the number of their keys (B).

    Returns the outputs, and both after these tokens.
    """
    B, L, D = k.shape
    total, number = past
    y, total1, number1 = (
        _new((B, L, D), (L * D, D, 1), k.dtype),
        _new((B, D), (D, 1), _DOUBLE),
        _new((B,), (1,), torch.int64),
    )
    found = [a.data_ptr() for a in (total, number, y, total1, number1)]
    _hydra(
        _hydra_fields(
            DTYPES[k.dtype], cosine, mean, eps, q.data_ptr(), k.data_ptr(), v.data_ptr(), _at(live), *found, B, L, D
        )
    )
    return y, (total1, number1)


def linear(q: Tensor, k: Tensor, v: Tensor, live: Tensor | None, past: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Extend linear attention with elu + 1 by L tokens (B, L, H e) after ``past``.

    ``past`` is m (B, H, e) and acc (B, H, e + 1, e). Returns the outputs, and both after these tokens.
    """
    B, L, D = k.shape
    m, acc = past
    _, H, e = m.shape
    y, m1 = _new((B, L, D), (L * D, D, 1), k.dtype), _new((B, H, e), (D, e, 1), _DOUBLE)
    acc1 = _new((B, H, e + 1, e), (D * (e + 1), e * (e + 1), e, 1), _DOUBLE)
    found = [a.data_ptr() for a in (m, acc, y, m1, acc1)]
    _linear(_linear_fields(DTYPES[k.dtype], q.data_ptr(), k.data_ptr(), v.data_ptr(), _at(live), *found, B, L, H, e))
    return y, (m1, acc1)
