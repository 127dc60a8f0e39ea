"""Extend states by a few tokens on the C library, on tensors and without autograd.

These functions run for every token that a model generates, so each wrapper makes one call of the library with one
packed struct, and does as little else as possible. All arguments are contiguous; what is not, or has another dtype or
number of elements than the kernel reads, is refused before its address leaves Python.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...errors import MixerError
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


def _check(who: str, dtype: torch.dtype, numbers: int, *tensors: Tensor | None) -> None:
    """Refuse tensors that do not hold this many numbers of this dtype, one after another in the memory of the CPU."""
    for a in tensors:
        if a is not None and (a.dtype is not dtype or a.numel() != numbers or not a.is_contiguous() or not a.is_cpu):
            where = f"{a.dtype} {tuple(a.shape)} on {a.device}" + (", not contiguous" * (not a.is_contiguous()))
            _refuse(who, f"{numbers} numbers of {dtype}, contiguous on the CPU", where)


def _check_weights(who: str, w: Tensor, B: int, h: int, L: int, S: int) -> None:
    """Raise an error unless log-weights have the shape (B or 1, h or 1, L, S)."""
    if w.ndim != 4 or w.shape[0] not in (1, B) or w.shape[1] not in (1, h) or w.shape[2:] != (L, S):
        _refuse(who, f"weights ({B} or 1, {h} or 1, {L}, {S})", f"{tuple(w.shape)}")
    _check(who, _DOUBLE, w.numel(), w)


def _dtype_number(who: str, a: Tensor, ndim: int) -> int:
    """Return the number of the dtype of the first tensor, which has this many dimensions."""
    number = DTYPES.get(a.dtype)
    if number is None or a.ndim != ndim:
        _refuse(who, f"float32, bfloat16 or float16 of {ndim} dimensions", f"{a.dtype} {tuple(a.shape)}")
    return number


def _refuse(who: str, wanted: str, got: str) -> NoReturn:
    raise MixerError(f"the C kernel step_{who} takes {wanted}, got {got}.")


def simple(q: Tensor | None, k: Tensor, v: Tensor, live: Tensor | None, past: Any) -> tuple[Tensor, Sums]:
    """Extend AFT-simple by L tokens (B, L, D) after the sums ``past``, which are m, num, den (B, D).

    Returns the outputs, and the sums after these tokens.
    """
    dtype = _dtype_number("simple", k, 3)
    B, L, D = k.shape
    m, num, den = past
    _check("simple", k.dtype, B * L * D, q, k, v)
    _check("simple", torch.bool, B * L, live)
    _check("simple", _DOUBLE, B * D, m, num, den)
    y = _new((B, L, D), (L * D, D, 1), k.dtype)
    m1, num1, den1 = _new((B, D), (D, 1), _DOUBLE), _new((B, D), (D, 1), _DOUBLE), _new((B, D), (D, 1), _DOUBLE)
    _simple(
        _simple_fields(
            dtype,
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


def _check_tokens(who: str, q: Tensor | None, new: Kept, kept: Kept, h: int) -> None:
    """Refuse new and kept keys of h numbers, values and marks that do not fit each other."""
    (k, v, live), (keys, values, lives), dtype = new, kept, new[1].dtype
    (B, L, D), R = v.shape, keys.shape[1]
    _check(who, dtype, B * L * D, q, v)
    _check(who, dtype, B * L * h, k)
    _check(who, torch.bool, B * L, live)
    _check(who, dtype, B * R * h, keys)
    _check(who, dtype, B * R * D, values)
    _check(who, torch.bool, B * R, lives)


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
    number, _ = _dtype_number("ring", v, 3), _dtype_number("ring", keys, 3)
    (B, L, D), (_, R, h), dtype = v.shape, keys.shape, v.dtype
    _check_tokens("ring", q, new, kept, h)
    if D % max(h, 1) if heads else h != D:
        _refuse("ring", f"keys of {D} features" + ", or of a number of heads that divides it" * heads, f"{h}")
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
    _check("ring", _DOUBLE, B * h, m, den)
    _check("ring", _DOUBLE, B * D, num)
    _check_weights("ring", w, B, h, L, R + L)
    if near is not None:
        _check("ring", torch.bool, (B if near.shape[0] == B else 1) * L * (R + L), near)
    rows, per_head, _, _ = w.shape
    _ring(
        _ring_fields(
            number,
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


def _check_places(who: str, at: Tensor, places: Tensor) -> tuple[int, int, int]:
    """Return the sizes B, L and R of positions (B, L) of new tokens and (B, R) of kept ones, or refuse them."""
    if at.ndim != 2 or places.ndim != 2:
        _refuse(who, "positions (B, L) and (B, R)", f"{tuple(at.shape)} and {tuple(places.shape)}")
    (B, L), R = at.shape, places.shape[1]
    _check(who, torch.int64, B * L, at)
    _check(who, torch.int64, B * R, places)
    return B, L, R


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
    dtype = _dtype_number("pairs", u, 2)
    B, L, R = _check_places("pairs", at, places)
    rows, rank = u.shape
    S, cols = R + L, rank if v is None else v.shape[0]
    _check("pairs", u.dtype, rows * rank, u)
    _check("pairs", u.dtype, cols * rank, v)
    if not 0 <= keep <= S:
        _refuse("pairs", f"keep from 0 to {S}", f"{keep}")
    w, after, fault = (
        _new((B, 1, L, S), (L * S, L * S, S, 1), _DOUBLE),
        _new((B, keep), (keep, 1), torch.int64),
        _new((1,), (1,), torch.int64),
    )
    near = None if window is None else _new((B, 1, L, S), (L * S, L * S, S, 1), torch.bool)
    _pairs(
        _pairs_fields(
            dtype,
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
    dtype = _dtype_number("taps", kernel, 2)
    B, L, R = _check_places("taps", at, places)
    (h, size), S = kernel.shape, R + L
    _check("taps", kernel.dtype, h * size, kernel)
    w, near = (
        _new((B, h, L, S), (h * L * S, L * S, S, 1), _DOUBLE),
        _new((B, 1, L, S), (L * S, L * S, S, 1), torch.bool),
    )
    after = _new((B, R), (R, 1), torch.int64)
    found = [a.data_ptr() for a in (kernel, at, places, w, near, after)]
    _taps(_taps_fields(dtype, *found, B, L, R, h, size))
    return w, near, after


def conv(weight: Tensor, new: Kept, kept: Kept) -> tuple[Tensor, Kept]:
    """Convolve L new tokens, feature by feature, with the last R before them, by their positions.

    Args:
        weight: (D, s), in the dtype of the tokens.
        new, kept: tokens (B, L or R, D), which of them are valid (B, L or R), and their positions (B, L or R), int64.

    Returns:
        The outputs (B, L, D), and the last R of all tokens.
    """
    dtype, _ = _dtype_number("conv", new[0], 3), _dtype_number("conv", weight, 2)
    (B, L, D), R = new[0].shape, kept[0].shape[1]
    _check("conv", weight.dtype, D * weight.shape[1], weight)
    for n, (tokens, marks, places) in ((L, new), (R, kept)):
        _check("conv", weight.dtype, B * n * D, tokens)
        _check("conv", torch.bool, B * n, marks)
        _check("conv", torch.int64, B * n, places)
    y, values = _new((B, L, D), (L * D, D, 1), weight.dtype), _new((B, R, D), (R * D, D, 1), weight.dtype)
    valid, places = _new((B, R), (R, 1), torch.bool), _new((B, R), (R, 1), torch.int64)
    (x, live, at), (old, lives, before) = new, kept
    found = [a.data_ptr() for a in (weight, x, old, live, lives, at, before, y, values, valid, places)]
    _conv(_conv_fields(dtype, *found, B, L, R, D, weight.shape[1]))
    return y, (values, valid, places)


def full(q: Tensor | None, new: Kept, kept: Kept, w: Tensor) -> Tensor:
    """Let L new tokens attend R kept keys and each other, causally: (B, L, D). w is (B or 1, 1, L, R + L), float64."""
    dtype, _ = _dtype_number("full", new[1], 3), _dtype_number("full", kept[0], 3)
    B, L, D = new[1].shape
    _check_tokens("full", q, new, kept, D)
    _check_weights("full", w, B, 1, L, kept[0].shape[1] + L)
    y = _new((B, L, D), (L * D, D, 1), new[1].dtype)
    inputs = [a.data_ptr() for a in (*new, *kept)]
    wb = w.stride(0) if w.shape[0] > 1 else 0
    _full(
        _ring_fields(
            dtype,
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
    dtype = _dtype_number("hydra", k, 3)
    B, L, D = k.shape
    total, number = past
    _check("hydra", k.dtype, B * L * D, q, k, v)
    _check("hydra", torch.bool, B * L, live)
    _check("hydra", _DOUBLE, B * D, total)
    _check("hydra", torch.int64, B, number)
    y, total1, number1 = (
        _new((B, L, D), (L * D, D, 1), k.dtype),
        _new((B, D), (D, 1), _DOUBLE),
        _new((B,), (1,), torch.int64),
    )
    found = [a.data_ptr() for a in (total, number, y, total1, number1)]
    _hydra(
        _hydra_fields(dtype, cosine, mean, eps, q.data_ptr(), k.data_ptr(), v.data_ptr(), _at(live), *found, B, L, D)
    )
    return y, (total1, number1)


def linear(q: Tensor, k: Tensor, v: Tensor, live: Tensor | None, past: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Extend linear attention with elu + 1 by L tokens (B, L, H e) after ``past``.

    ``past`` is m (B, H, e) and acc (B, H, e + 1, e). Returns the outputs, and both after these tokens.
    """
    dtype = _dtype_number("linear", k, 3)
    B, L, D = k.shape
    m, acc = past
    if m.ndim != 3 or m.shape[0] != B or m.shape[1] * m.shape[2] != D:
        _refuse("linear", f"sums ({B}, H, e) of {D} features", f"{tuple(m.shape)}")
    _, H, e = m.shape
    _check("linear", k.dtype, B * L * D, q, k, v)
    _check("linear", torch.bool, B * L, live)
    _check("linear", _DOUBLE, B * D, m)
    _check("linear", _DOUBLE, B * D * (e + 1), acc)
    y, m1 = _new((B, L, D), (L * D, D, 1), k.dtype), _new((B, H, e), (D, e, 1), _DOUBLE)
    acc1 = _new((B, H, e + 1, e), (D * (e + 1), e * (e + 1), e, 1), _DOUBLE)
    found = [a.data_ptr() for a in (m, acc, y, m1, acc1)]
    _linear(_linear_fields(dtype, q.data_ptr(), k.data_ptr(), v.data_ptr(), _at(live), *found, B, L, H, e))
    return y, (m1, acc1)
