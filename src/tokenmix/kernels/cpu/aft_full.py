"""Run AFT-full on the C library, on tensors and without autograd.

Rows are processed in blocks: of the (T, S) weights, only the log-weights of one block and their
exponentials are ever held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import DTYPES, empty_result, function, pointers, rows, strides
from .nonfinite import (
    NAN,
    Alarm,
    alarm_address,
    find_nan_gradients,
    is_marked,
    mark,
    mark_gradients,
    remove_nonfinite,
    spoilt_weights,
    without_weights,
)

ROWS, HALF_ROWS = 512, 1024  # in a block: of float32, and of bfloat16
RANGE, GROUP, STRIP, STEPS, PANEL = 48, 48, 32, 32, 64  # as in aft_full.c; PANEL is the widest
GROUPS = -(-HALF_ROWS // GROUP)
FLOAT = 16.0  # factors whose product may be larger than this are multiplied in float64

_ranges = function("full_ranges", "i" + "p" * 4 + "l" * 5 + "i")
_pack = function("full_pack", "iiii" + "p" * 6 + "l" * 6 + "i")
_forward = function("full_forward", "iiiii" + "p" * 14 + "l" * 14 + "ip")
_backward_keys = function("full_backward_keys", "iiiii" + "p" * 21 + "l" * 16 + "i")
_backward_weights = function("full_backward_weights", "iiii" + "p" * 12 + "l" * 13 + "i")

_half = function("full_half", "p")

Saved = tuple[Tensor, Tensor]


@cache
def half_products() -> int:
    """Say how this processor multiplies bfloat16 tensors, with sums in float32: 2 by tiles (AMX), 1 by pairs, 0 not."""
    found = torch.zeros(1, dtype=torch.int32, device="cpu")
    _half(*pointers(found))
    return int(found)


def saved_shapes(
    q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, w2: Tensor | None, mask: Tensor | None, *, causal: bool
) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors saved for the backward pass besides its inputs.

    These are the output before the gate, and the denominator.
    """
    return [(k.shape[0], w.shape[1], k.shape[2])] * 2


def forward(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    w2: Tensor | None,
    mask: Tensor | None,
    *,
    causal: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (B, T, D), and the tensor saved for the backward pass (empty unless ``save``).

    k, v are (B, S, D); the log-weights are w (Bw, T, S), or w w2^T with w (Bw, T, r) and w2 (Bw, S, r); Bw is 1 or B.
    """
    alarm = Alarm()
    y, y0, den = _run(q, k, v, w, w2, mask, alarm, causal=causal, save=save)
    if alarm:
        w, w2, bad = without_weights(w, w2, mask, causal=causal)
        rest = remove_nonfinite(q, k, v, mask, w.shape[1], causal=causal, weights=bad)
        y = _run(rest.q, rest.k, rest.v, w, w2, mask, None, causal=causal, save=False)[0].masked_fill_(rest.rows, NAN)
        mark(den)
    return y, y0, den


def _run(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    w2: Tensor | None,
    mask: Tensor | None,
    alarm: Alarm | None,
    *,
    causal: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, mask = None if q is None else rows(q), rows(k), rows(v), None if mask is None else mask.contiguous()
    T = w.shape[1]
    y = empty_result((k.shape[0], T, k.shape[2]), k.dtype)
    y0, den = (empty_result(shape if save else (0,)) for shape in saved_shapes(q, k, v, w, w2, mask, causal=causal))
    for part in _parts(w, w2, k, mask, causal, y0 if save else None, den if save else None, q, k, v, mask, y):
        _forward_part(part, alarm, *part.tensors)
    return y, y0, den


def extend(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    """Return the last L rows (B, L, D) of the causal form over k, v (B, S, D).

    w (Bw, L, S) holds the log-weights of these rows only; Bw is 1 or B.
    """
    before, alarm = k.shape[1] - w.shape[1], Alarm()
    y = _extend(q, k, v, w, mask, alarm)
    if alarm:
        w, _, bad = without_weights(w, None, mask, causal=True, before=before)
        rest = remove_nonfinite(None, k, v, mask, k.shape[1], causal=True)
        hidden = rest.rows[:, before:] | bad
        if q is not None:
            q, hidden = q.masked_fill(q.isnan(), 0.0), hidden | q.isnan()
        y = _extend(q, rest.k, rest.v, w, mask, None).masked_fill(hidden, NAN)
    return y


def _extend(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor, alarm: Alarm | None) -> Tensor:
    before = k.shape[1] - w.shape[1]
    q, k, v, mask, y = (
        None if q is None else _pad_front(before, q),
        rows(k),
        rows(v),
        mask.contiguous(),
        empty_result(k.shape, k.dtype),
    )
    for part in _parts(w, None, k, mask, True, q, k, v, mask, y, before=before):
        _forward_part(part, alarm, None, None, *part.tensors)
    return y[:, before:]


def _pad_front(n: int, a: Tensor) -> Tensor:
    """Return a (B, L, D) after n rows that are never written or read, so that the system allots no pages to them."""
    room = empty_result((a.shape[0], n + a.shape[1], a.shape[2]), a.dtype)
    room[:, n:] = a
    return room


def _forward_part(
    part: _Part,
    alarm: Alarm | None,
    y0: Tensor | None,
    den: Tensor | None,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    y: Tensor,
) -> None:
    for block in part.blocks(keys=False):
        fixed = (
            DTYPES[k.dtype],
            DTYPES[block.w.dtype],
            int(q is not None),
            int(part.causal),
            part.half,
            *pointers(q, k, v, mask, *block.packed, y, y0, den),
        )
        _forward(*fixed, *part.sizes, *block.sizes, *strides(q, k, v), torch.get_num_threads(), alarm_address(alarm))


def backward(
    g: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    w2: Tensor | None,
    mask: Tensor | None,
    y0: Tensor,
    den: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dq (empty without q), dk, dv, dw, dw2 (empty without w2)."""
    if is_marked(den):
        return _backward_without(g, q, k, v, w, w2, mask, causal=causal)
    g, q, k, v, mask = (
        rows(g),
        None if q is None else rows(q),
        rows(k),
        rows(v),
        None if mask is None else mask.contiguous(),
    )
    dq = empty_result((0,) if q is None else q.shape, k.dtype)
    dk, dv = (empty_result(k.shape).zero_() for _ in range(2))
    dw, dw2 = empty_result(w.shape, w.dtype).zero_(), empty_result((0,) if w2 is None else w2.shape).zero_()
    for part in _parts(w, w2, k, mask, causal, g, q, k, v, mask, y0, den, None if q is None else dq, dk, dv):
        rest = _rest(part)
        for block in part.blocks(keys=True):
            _backward_block(part, block, rest, causal)
            part.spread(block, dw, dw2)
    return dq, dk.to(k.dtype), dv.to(k.dtype), dw, dw2.to(k.dtype if w2 is None else w.dtype)


def _backward_without(
    g: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    w2: Tensor | None,
    mask: Tensor | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    w, w2, bad = without_weights(w, w2, mask, causal=causal)
    rest = remove_nonfinite(q, k, v, mask, w.shape[1], causal=causal, weights=bad)
    hot = find_nan_gradients(g, rest.rows, mask, k.shape[1], causal=causal)
    _, y0, den = _run(rest.q, rest.k, rest.v, w, w2, mask, None, causal=causal, save=True)
    *grads, dw, dw2 = backward(hot.g, rest.q, rest.k, rest.v, w, w2, mask, y0, den, causal=causal)
    dq, dk, dv = mark_gradients(grads, hot)
    return dq, dk, dv, *spoilt_weights(dw, dw2, hot, causal=causal)


def _rest(part: _Part) -> list[Tensor]:
    """Allocate what full_backward_keys leaves for full_backward_weights.

    These are Z, rates, exponents, and which groups of rows took the literal form.
    """
    B, T, _, D = part.sizes
    n, strips = min(T, part.most), -(-D // STRIP)
    z = empty_result((B, -(-n // PANEL) * PANEL, strips * 2 * STRIP), torch.bfloat16 if part.half else torch.float32)
    return [z, *(empty_result((B, n, D)) for _ in range(2)), empty_result((B, strips, GROUPS), torch.uint8)]


def _backward_block(part: _Part, block: _Block, rest: list[Tensor], causal: bool) -> None:
    g, q, k, v, mask, y0, den, dq, dk, dv = part.tensors
    assert k is not None
    dtypes, threads = (DTYPES[k.dtype], DTYPES[block.w.dtype]), torch.get_num_threads()
    arrays = pointers(q, k, v, g, mask, *block.packed, y0, den, dq, dk, dv, *rest)
    _backward_keys(
        *dtypes,
        int(q is not None),
        int(causal),
        part.half,
        *arrays,
        *part.sizes,
        *block.sizes,
        *strides(q, k, v, g),
        threads,
    )
    arrays = pointers(k, v, mask, block.w, block.packed[1], part.kmax, y0, *rest, block.dw)
    _backward_weights(
        *dtypes,
        int(causal),
        part.half,
        *arrays,
        *part.sizes,
        *block.sizes,
        *strides(k, v),
        block.dw.stride(0),
        threads,
    )


def _even_block(T: int, most: int) -> int:
    """Return the rows in a block, so that all blocks have about as many, in whole panels."""
    blocks = -(-T // most)
    return -(-T // (blocks * PANEL)) * PANEL


@dataclass
class _Block:
    """A block of rows: its log-weights, what full_pack made of them, and memory for their gradient."""

    w: Tensor
    packed: list[Tensor]  # w, top, span, slack, kmax, kmin, e
    sizes: tuple[int, int, int, int]  # t0, rows, hi, ldw
    dw: Tensor


def _parts(
    w: Tensor, w2: Tensor | None, k: Tensor, mask: Tensor | None, causal: bool, *tensors: Tensor | None, before: int = 0
) -> Iterator[_Part]:
    """Cut the batch into parts that share one set of log-weights.

    ``before`` is the number of rows of the causal form before the first row of w.
    """
    shared, (B, S, D) = w.shape[0] == 1, k.shape
    kmax, kmin = (empty_result((B, -(-S // RANGE), D)) for _ in range(2))
    _ranges(
        DTYPES[k.dtype],
        *pointers(k, mask, kmax, kmin),
        B,
        S,
        D,
        *k.stride()[:2],
        torch.get_num_threads(),
    )
    for i in range(w.shape[0]):
        cut = slice(None) if shared else slice(i, i + 1)
        yield _Part(
            i,
            w[i],
            None if w2 is None else w2[i],
            kmax[cut],
            kmin[cut],
            mask if mask is None else mask[cut],
            S,
            causal,
            half_products() if k.dtype == torch.bfloat16 else 0,
            _cut(tensors, cut),
            before,
        )


def _cut(tensors: tuple[Tensor | None, ...], cut: slice) -> list[Tensor | None]:
    return [None if a is None else a[cut] for a in tensors]


@dataclass
class _Part:
    """Batch rows that share their log-weights: w (T, S), or w (T, r) and w2 (S, r)."""

    index: int
    w: Tensor
    w2: Tensor | None
    kmax: Tensor
    kmin: Tensor
    mask: Tensor | None
    S: int
    causal: bool
    half: int  # E, X and Z in bfloat16: half_products()
    tensors: list[Any]
    before: int = 0

    def __post_init__(self) -> None:
        if self.w2 is not None:
            u, v = self.w.float(), self.w2.float()
            # a bound on the products
            wide = float(u.square().sum(-1).max() * v.square().sum(-1).max()) > FLOAT**2 if u.numel() else False
            self.w, self.w2 = (u.double(), v.double()) if wide else (u, v)

    @property
    def most(self) -> int:
        """Return the most rows in a block."""
        return HALF_ROWS if self.half else ROWS

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return B, T, S, D."""
        return self.kmax.shape[0], self.before + self.w.shape[0], self.S, self.kmax.shape[2]

    def blocks(self, *, keys: bool) -> Iterator[_Block]:
        """Yield one block of rows after another, E packed by rows or by keys; scratch memory is reused."""
        B, _, S, _ = self.sizes
        T = self.w.shape[0]
        top, span, slack = empty_result((self.most,)), empty_result((GROUPS,)), empty_result((B, GROUPS))
        size = (min(T, self.most) + STEPS) * (S + STEPS)
        e = empty_result([size], torch.bfloat16 if self.half else torch.float32)
        step = _even_block(T, self.most)
        for t0 in range(0, T, step):
            n, hi = min(step, T - t0), min(S, self.before + t0 + step) if self.causal else S
            w = rows(self.w[t0 : t0 + n, :hi] if self.w2 is None else self.w[t0 : t0 + n] @ self.w2[:hi].T)
            w = w if w.dtype in DTYPES else w.float()
            sizes = self.before + t0, n, hi, w.stride(0)
            _pack(
                DTYPES[w.dtype],
                int(keys),
                self.half,
                int(self.causal),
                *pointers(w, self.mask, top, span, slack, e),
                B,
                S,
                *sizes,
                torch.get_num_threads(),
            )
            yield _Block(w, [w, top, span, slack, self.kmax, self.kmin, e], sizes, empty_result((n, hi)) if keys else e)

    def spread(self, block: _Block, dw: Tensor, dw2: Tensor) -> None:
        """Add the gradient of a block of log-weights to the gradients of w and w2, from which they were made."""
        t0, n, hi, _ = block.sizes
        if self.w2 is None:
            dw[self.index, t0 : t0 + n, :hi] = block.dw
        else:
            own = block.dw.to(self.w.dtype)
            dw[self.index, t0 : t0 + n] = own @ self.w2[:hi]
            dw2[self.index, :hi] += own.T @ self.w[t0 : t0 + n]
