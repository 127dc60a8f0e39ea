"""Hold what the tensor-core kernels share: units, exponentials, masks, the gate, and how each dtype is multiplied.

Half precision uses powers of two with whole numbers as maxima, so that a larger maximum changes no rounded number.
float32 uses natural exponents, also with whole maxima, so that the sum of two of them is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import INTERPRETED

DEAD = tl.constexpr(-3.4028234663852886e38)  # float32's minimum: a key that counts as masked
NONE = tl.constexpr(-2.0e38)  # the maximum of no keys
CAP = tl.constexpr(300.0)  # larger log-weights count as this value
LIMIT = tl.constexpr(2.0**-60)  # a denominator below this may have lost terms to underflow


def _span(*ends: Any, num_stages: int = 0) -> Iterator[Any]:
    """Iterate like ``range``, by comparisons.

    triton 3.6's interpreter holds numbers as arrays of one element, which numpy since 2.4 does not accept as integers.
    """
    i, end, step = (0, *ends, 1)[:3] if len(ends) == 1 else (*ends, 1)[:3]
    while i < end:
        yield i
        i = i + step


span = _span if INTERPRETED else tl.range


@triton.jit
def units(x, BASE2: tl.constexpr):
    """Convert natural exponents to the kernel's unit."""
    x = tl.maximum(tl.minimum(x.to(tl.float32), 2.0e38), NONE)
    if BASE2:
        x = x * 1.4426950408889634
    return x


@triton.jit
def power(x, BASE2: tl.constexpr):
    """Compute the exponential of what ``units`` returns."""
    if BASE2:
        e = tl.exp2(x)
    else:
        e = tl.exp(x)
    return e


@triton.jit
def plus(a, b, top, BASE2: tl.constexpr):
    """Compute a + b - top for a + b up to about top; in float32, add back what rounding the sum loses."""
    s = a + b
    x = s - top
    if not BASE2:
        r = s - a
        x += tl.where(tl.abs(s) < 1.0e30, (a - (s - r)) + (b - r), 0.0)
    return x


@triton.jit
def operand(x, like, DROP: tl.constexpr):
    """Convert x for a product: to the type ``like`` points to, or to float32 rounded to nearest without DROP bits."""
    if DROP:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        y = ((bits + (1 << (DROP - 1))) & -(1 << DROP)).to(tl.float32, bitcast=True)
    else:
        y = x.to(like.dtype.element_ty)
    return y


@triton.jit
def weights(p, ok, BASE2: tl.constexpr):
    """Load log-weights, capped."""
    return units(tl.minimum(tl.load(p, mask=ok, other=0.0).to(tl.float32), CAP), BASE2)


@triton.jit
def valid_keys(MASK, b, s, S):
    """Say which of these keys exist and are not masked."""
    ok = (s >= 0) & (s < S)
    if MASK is not None:
        ok = ok & (tl.load(MASK + b * S + s, mask=ok, other=0) != 0)
    return ok


@triton.jit
def key(p, ok, BASE2: tl.constexpr):
    """Load keys in the kernel's unit, and say which of them are valid."""
    k = tl.load(p, mask=ok, other=DEAD).to(tl.float32)
    return units(k, BASE2), k > DEAD


@triton.jit
def sigmoid(q):
    """Compute sigmoid(q)."""
    return 1.0 / (1.0 + tl.exp(-q))


@triton.jit
def load_marks(MARKS, start, total, EACH: tl.constexpr, LOOK: tl.constexpr):
    """Load the marks of the next LOOK tiles of this program, of which EACH share one; 0 beyond the end."""
    at = start + tl.program_id(0) + tl.num_programs(0) * tl.arange(0, LOOK)
    return tl.load(MARKS + at // EACH, mask=at < total, other=0)


@triton.jit
def is_marked(marks, n, LOOK: tl.constexpr):
    """Say whether the tile n of ``load_marks`` has a mark."""
    return tl.sum(tl.where(tl.arange(0, LOOK) == n, marks, 0), 0) != 0


@triton.jit
def tile_of(start, n):
    """Return the number of the tile n of ``load_marks``."""
    return start + tl.program_id(0) + tl.num_programs(0) * n


class Numbers(NamedTuple):
    """Hold how numbers of a dtype are multiplied."""

    operand: torch.dtype
    precision: str
    base2: bool
    drop: int  # bits of a float32 that the product ignores
    registers: int = 0  # what a thread may use beside products; 0 leaves it to ptxas


# the interpreter cannot multiply bfloat16, so it takes the same numbers in float32
_BFLOAT = (torch.float32, 16) if INTERPRETED else (torch.bfloat16, 0)

BY_DTYPE = {
    torch.bfloat16: Numbers(_BFLOAT[0], "tf32", True, _BFLOAT[1]),
    torch.float16: Numbers(torch.float32, "tf32", True, 13),  # float16's precision with the range of float32
    torch.float32: Numbers(torch.float32, "ieee", False, 0, 168),
}


PROGRAMS = 528  # at most these look for marks: four for each multiprocessor of an H200
LOOK = 64  # the tiles whose marks a program loads at once


def marks_grid(tiles: int) -> tuple[int]:
    """Return the grid of a kernel that looks for the marked ones of ``tiles`` tiles."""
    return (min(PROGRAMS, -(-tiles // LOOK)),)


def round_up(n: int, to: int) -> int:
    """Round n up to a multiple of ``to``."""
    return -(-n // to) * to


def rows(a: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous."""
    return a if a.stride(-1) == 1 else a.contiguous()


def strides(a: Tensor | None) -> tuple[int, int]:
    """Return the element strides of batch and time."""
    return (0, 0) if a is None else (a.stride(0), a.stride(1))
