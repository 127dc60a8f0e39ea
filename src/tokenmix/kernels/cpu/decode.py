"""Extend states by a few tokens on the C library, on tensors and without autograd.

These functions run for every token that a model generates, so each wrapper makes one call of the library with one
packed struct, and does as little else as possible. All arguments are contiguous; what is not, or has another dtype or
number of elements than the kernel reads, is refused before its address leaves Python.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NoReturn

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
_fade = function("fade_forward", "iid" + "p" * 13 + "l" * 11 + "i")


def _address(a: Tensor | None) -> int:
    return 0 if a is None else a.data_ptr()


def _check(who: str, *wanted: tuple[torch.dtype, int, Tensor | None]) -> None:
    """Refuse tensors that are not contiguous on the CPU, or have another dtype or number of elements than wanted."""
    for dtype, numbers, a in wanted:
        if a is not None and (a.dtype is not dtype or a.numel() != numbers or not a.is_contiguous() or not a.is_cpu):
            where = f"{a.dtype} {tuple(a.shape)} on {a.device}" + (", not contiguous" * (not a.is_contiguous()))
            _refuse(who, f"{numbers} numbers of {dtype}, contiguous on the CPU", where)


def _check_weights(who: str, w: Tensor, B: int, h: int, L: int, S: int) -> None:
    """Raise an error unless log-weights have the shape (B or 1, h or 1, L, S)."""
    if w.ndim != 4 or w.shape[0] not in (1, B) or w.shape[1] not in (1, h) or w.shape[2:] != (L, S):
        _refuse(who, f"weights ({B} or 1, {h} or 1, {L}, {S})", f"{tuple(w.shape)}")


def _refuse_main(who: str, a: Tensor, ndim: int) -> NoReturn:
    _refuse(who, f"float32, bfloat16 or float16 of {ndim} dimensions", f"{a.dtype} {tuple(a.shape)}")


def _refuse(who: str, wanted: str, got: str) -> NoReturn:
    raise MixerError(f"the C kernel step_{who} takes {wanted}, got {got}.")


def simple(q: Tensor | None, k: Tensor, v: Tensor, live: Tensor | None, past: Sums) -> tuple[Tensor, Sums]:
    """Extend AFT-simple by L tokens (B, L, D) after the sums ``past``, which are m, num, den (B, D).

    Returns the outputs, and the sums after these tokens.
    """
    dtype = k.dtype
    if dtype not in DTYPES or k.ndim != 3:
        _refuse_main("simple", k, 3)
    B, L, D = k.shape
    (m, num, den), new, sums = past, B * L * D, B * D
    _check(
        "simple",
        (dtype, new, q),
        (dtype, new, k),
        (dtype, new, v),
        (torch.bool, B * L, live),
        (_DOUBLE, sums, m),
        (_DOUBLE, sums, num),
        (_DOUBLE, sums, den),
    )
    y = _new((B, L, D), (L * D, D, 1), dtype)
    m1, num1, den1 = _new((B, D), (D, 1), _DOUBLE), _new((B, D), (D, 1), _DOUBLE), _new((B, D), (D, 1), _DOUBLE)
    _simple(
        _simple_fields(
            DTYPES[dtype],
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
    dtype = v.dtype
    if dtype not in DTYPES or v.ndim != 3 or keys.ndim != 3:
        _refuse_main("ring", v if keys.ndim == 3 else keys, 3)
    (B, L, D), (_, R, h) = v.shape, keys.shape
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
    _check_weights("ring", w, B, h, L, R + L)
    _check(
        "ring",
        (dtype, B * L * D, q),
        (dtype, B * L * h, k),
        (dtype, B * L * D, v),
        (torch.bool, B * L, live),
        (dtype, B * R * h, keys),
        (dtype, B * R * D, values),
        (torch.bool, B * R, lives),
        (_DOUBLE, B * h, m),
        (_DOUBLE, B * D, num),
        (_DOUBLE, B * h, den),
        (_DOUBLE, w.numel(), w),
        (torch.bool, 0 if near is None else (B if near.shape[0] == B else 1) * L * (R + L), near),
    )
    rows, per_head, _, _ = w.shape
    tokens = 0 if q is None else q.data_ptr(), k.data_ptr(), v.data_ptr(), live.data_ptr()
    ring = keys.data_ptr(), values.data_ptr(), lives.data_ptr()
    sums = m.data_ptr(), num.data_ptr(), den.data_ptr()
    weights = w.data_ptr(), 0 if near is None else near.data_ptr()
    after = keys1.data_ptr(), values1.data_ptr(), lives1.data_ptr(), m1.data_ptr(), num1.data_ptr(), den1.data_ptr()
    strides = w.stride(0) if rows > 1 else 0, w.stride(1) if per_head > 1 else 0
    by_row = 0 if near is None or near.shape[0] == 1 else near.stride(0)
    given = *tokens, *ring, *sums, *weights, y.data_ptr(), *after
    _ring(_ring_fields(DTYPES[dtype], heads, *given, B, L, R, D, h, *strides, by_row))
    return y, (keys1, values1, lives1), (m1, num1, den1)


def pairs(
    u: Tensor, v: Tensor | None, at: Tensor, places: Tensor, *, window: int | None, keep: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Compute the log-weights of new tokens for the kept ones and each other.

    Args:
        u, v: the factors (rows, rank) and (cols, rank), or the table (rows, cols) and None.
        at, places: the positions (B, L) of new tokens and (B, R) of kept ones.

    Returns:
        The log-weights (B, 1, L, R + L), which of these pairs lie inside the window, the last ``keep`` positions, and
        one number: whether a position lies outside the bias, so that the weights are not to be read.
    """
    dtype = u.dtype
    if dtype not in DTYPES or u.ndim != 2:
        _refuse_main("pairs", u, 2)
    if at.ndim != 2 or places.ndim != 2:
        _refuse("pairs", "positions (B, L) and (B, R)", f"{tuple(at.shape)} and {tuple(places.shape)}")
    (B, L), R, (rows, rank) = at.shape, places.shape[1], u.shape
    S, cols = R + L, rank if v is None else v.shape[0]
    _check(
        "pairs",
        (dtype, rows * rank, u),
        (dtype, cols * rank, v),
        (torch.int64, B * L, at),
        (torch.int64, B * R, places),
    )
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
            DTYPES[dtype],
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
    return w, near, after, fault


def taps(kernel: Tensor, at: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log-weights that a filter (h, s) gives new tokens for the kept ones and each other.

    The positions are ``at`` (B, L) of new tokens and ``places`` (B, R) of kept ones. Returns the log-weights
    (B, h, L, R + L), which of these pairs the filter reaches (B, 1, L, R + L), and the last R positions.
    """
    if kernel.dtype not in DTYPES or kernel.ndim != 2:
        _refuse_main("taps", kernel, 2)
    if at.ndim != 2 or places.ndim != 2:
        _refuse("taps", "positions (B, L) and (B, R)", f"{tuple(at.shape)} and {tuple(places.shape)}")
    (B, L), R, (h, size) = at.shape, places.shape[1], kernel.shape
    S = R + L
    _check("taps", (kernel.dtype, h * size, kernel), (torch.int64, B * L, at), (torch.int64, B * R, places))
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
    (x, live, at), (old, lives, before), dtype = new, kept, weight.dtype
    if dtype not in DTYPES or weight.ndim != 2 or x.ndim != 3:
        _refuse_main("conv", *((x, 3) if x.ndim != 3 else (weight, 2)))
    (B, L, D), R, size = x.shape, old.shape[1], weight.shape[1]
    _check(
        "conv",
        (dtype, D * size, weight),
        (dtype, B * L * D, x),
        (torch.bool, B * L, live),
        (torch.int64, B * L, at),
        (dtype, B * R * D, old),
        (torch.bool, B * R, lives),
        (torch.int64, B * R, before),
    )
    y, values = _new((B, L, D), (L * D, D, 1), dtype), _new((B, R, D), (R * D, D, 1), dtype)
    valid, places = _new((B, R), (R, 1), torch.bool), _new((B, R), (R, 1), torch.int64)
    _conv(
        _conv_fields(
            DTYPES[dtype],
            weight.data_ptr(),
            x.data_ptr(),
            old.data_ptr(),
            live.data_ptr(),
            lives.data_ptr(),
            at.data_ptr(),
            before.data_ptr(),
            y.data_ptr(),
            values.data_ptr(),
            valid.data_ptr(),
            places.data_ptr(),
            B,
            L,
            R,
            D,
            size,
        )
    )
    return y, (values, valid, places)


def full(q: Tensor | None, new: Kept, kept: Kept, w: Tensor) -> Tensor:
    """Let L new tokens attend R kept keys and each other, causally: (B, L, D). w is (B or 1, 1, L, R + L), float64."""
    (k, v, live), (keys, values, lives), dtype = new, kept, new[1].dtype
    if dtype not in DTYPES or v.ndim != 3 or keys.ndim != 3:
        _refuse_main("full", v if keys.ndim == 3 else keys, 3)
    (B, L, D), R = v.shape, keys.shape[1]
    _check_weights("full", w, B, 1, L, R + L)
    tokens, past = B * L * D, B * R * D
    _check(
        "full",
        (dtype, tokens, q),
        (dtype, tokens, k),
        (dtype, tokens, v),
        (torch.bool, B * L, live),
        (dtype, past, keys),
        (dtype, past, values),
        (torch.bool, B * R, lives),
        (_DOUBLE, w.numel(), w),
    )
    y = _new((B, L, D), (L * D, D, 1), dtype)
    inputs = [a.data_ptr() for a in (*new, *kept)]
    wb = w.stride(0) if w.shape[0] > 1 else 0
    _full(
        _ring_fields(
            DTYPES[dtype],
            0,
            _address(q),
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
            R,
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
    dtype = k.dtype
    if dtype not in DTYPES or k.ndim != 3:
        _refuse_main("hydra", k, 3)
    B, L, D = k.shape
    (total, number), tokens = past, B * L * D
    _check(
        "hydra",
        (dtype, tokens, q),
        (dtype, tokens, k),
        (dtype, tokens, v),
        (torch.bool, B * L, live),
        (_DOUBLE, B * D, total),
        (torch.int64, B, number),
    )
    y, total1, number1 = (
        _new((B, L, D), (L * D, D, 1), dtype),
        _new((B, D), (D, 1), _DOUBLE),
        _new((B,), (1,), torch.int64),
    )
    _hydra(
        _hydra_fields(
            DTYPES[dtype],
            cosine,
            mean,
            eps,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            0 if live is None else live.data_ptr(),
            total.data_ptr(),
            number.data_ptr(),
            y.data_ptr(),
            total1.data_ptr(),
            number1.data_ptr(),
            B,
            L,
            D,
        )
    )
    return y, (total1, number1)


def linear(
    q: Tensor, k: Tensor, v: Tensor, live: Tensor | None, past: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Extend linear attention with elu + 1 by L tokens (B, L, H e) after ``past``.

    ``past`` is m (B, H, e) and acc (B, H, e + 1, e). Returns the outputs, and both after these tokens.
    """
    dtype = k.dtype
    if dtype not in DTYPES or k.ndim != 3:
        _refuse_main("linear", k, 3)
    B, L, D = k.shape
    (m, acc), tokens = past, B * L * D
    if m.ndim != 3 or m.shape[0] != B or m.shape[1] * m.shape[2] != D:
        _refuse("linear", f"sums ({B}, H, e) of {D} features", f"{tuple(m.shape)}")
    _, H, e = m.shape
    _check(
        "linear",
        (dtype, tokens, q),
        (dtype, tokens, k),
        (dtype, tokens, v),
        (torch.bool, B * L, live),
        (_DOUBLE, B * D, m),
        (_DOUBLE, B * D * (e + 1), acc),
    )
    y, m1 = _new((B, L, D), (L * D, D, 1), dtype), _new((B, H, e), (D, e, 1), _DOUBLE)
    acc1 = _new((B, H, e + 1, e), (D * (e + 1), e * (e + 1), e, 1), _DOUBLE)
    _linear(
        _linear_fields(
            DTYPES[dtype],
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            0 if live is None else live.data_ptr(),
            m.data_ptr(),
            acc.data_ptr(),
            y.data_ptr(),
            m1.data_ptr(),
            acc1.data_ptr(),
            B,
            L,
            H,
            e,
        )
    )
    return y, (m1, acc1)


def forget(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, live: Tensor | None, past: Sums, *, heads: int, eps: float
) -> tuple[Tensor, Sums]:
    """Extend AFT-forget by L tokens (B, L, D) with log-decays g after the sums ``past``, m, num, den (B, D).

    Returns the outputs, normalised per head unless ``heads`` is 0, and the sums after these tokens.
    """
    dtype = k.dtype
    if dtype not in DTYPES or k.ndim != 3:
        _refuse_main("forget", k, 3)
    B, L, D = k.shape
    (m, num, den), tokens, sums = past, B * L * D, B * D
    if heads and D % heads:
        _refuse("forget", f"heads that divide {D} features", f"{heads}")
    _check(
        "forget",
        (dtype, tokens, q),
        (dtype, tokens, k),
        (dtype, tokens, v),
        (dtype, tokens, g),
        (torch.bool, B * L, live),
        (_DOUBLE, sums, m),
        (_DOUBLE, sums, num),
        (_DOUBLE, sums, den),
    )
    y, row = _new((B, L, D), (L * D, D, 1), dtype), L * D
    m1, num1, den1 = _new((B, D), (D, 1), _DOUBLE), _new((B, D), (D, 1), _DOUBLE), _new((B, D), (D, 1), _DOUBLE)
    _fade(
        DTYPES[dtype],
        heads,
        eps,
        None if q is None else q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        g.data_ptr(),
        None if live is None else live.data_ptr(),
        y.data_ptr(),
        None,
        m.data_ptr(),
        num.data_ptr(),
        den.data_ptr(),
        m1.data_ptr(),
        num1.data_ptr(),
        den1.data_ptr(),
        B,
        L,
        D,
        *((0, 0) if q is None else (row, D)),
        *(row, D) * 3,
        torch.get_num_threads(),
    )
    return y, (m1, num1, den1)
