"""Launch Triton kernels, or only record what would be launched.

Launchers call only ``launch``, so running them on meta tensors under ``record_launches()`` records the configurations
they choose (dtypes, constants, warps, stages). ``aot.py`` compiles these, and no second table can disagree with them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...types import Options
from . import INTERPRETED

if TYPE_CHECKING:
    from triton import JITFunction


class Launch(NamedTuple):
    """Hold one launch: the kernel, its arguments by name (constants included), the compiler's options, and its size."""

    kernel: JITFunction | Callable[..., object]  # or the function of torch that is called in its place
    args: Options
    options: dict[str, int]
    grid: tuple[int, ...]
    flops: float


class _Notes(threading.local):
    """The launches that this thread records; None where it launches."""

    made: list[Launch] | None = None


_notes = _Notes()


def launch(
    kernel: JITFunction,
    grid: tuple[int, ...],
    *args: object,
    warps: int = 4,
    stages: int = 3,
    registers: int = 0,
    flops: float = 0.0,
    **constants: object,
) -> None:
    """Launch ``kernel[grid](*args, **constants)``; an empty grid launches nothing.

    ``registers`` limits what each thread may use, for kernels in which ptxas would otherwise spill. ``flops`` is what
    the kernel's matrix products take, a multiplication and an addition counted as two; it is only recorded.
    """
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True} | (
        {"maxnreg": registers} if registers else {}
    )
    if _notes.made is not None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | constants
        _notes.made.append(Launch(kernel, given, options, grid, flops))
    elif 0 not in grid:
        with _device(args):
            kernel[grid](*args, **constants, **options)


def _device(args: tuple[object, ...]) -> contextlib.AbstractContextManager[object]:
    """Make the device of the tensors the current one, on which Triton launches."""
    first = next((a for a in args if isinstance(a, Tensor)), None)
    return contextlib.nullcontext() if INTERPRETED or first is None else torch.cuda.device(first.device)


SUMMED = 512  # terms of products of float32 that are summed before they are added to the others


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write a @ b, or with ``add`` add it, to ``out`` (B, ., .) in float32, by torch, which calls cuBLAS on a GPU."""
    K = a.shape[-1]
    if _notes.made is not None:
        _notes.made.append(Launch(multiply, {"A": a, "B": b, "OUT": out}, {}, (), 2.0 * out.numel() * K))
        return
    step = SUMMED if a.dtype == torch.float32 else K
    wide: dict[str, Any] = {} if a.dtype == torch.float32 else {"out_dtype": torch.float32}
    for at in range(0, K, step):
        left, right = a[..., at : at + step], b[:, at : at + step]
        if at or add:
            torch.baddbmm(out, left, right, out=out, **wide)
        else:
            torch.bmm(left, right, out=out, **wide)


def add_batch(parts: Tensor) -> Tensor:
    """Sum over the batch, (1, ., .)."""
    if _notes.made is not None:
        _notes.made.append(Launch(add_batch, {"PARTS": parts}, {}, (), 0.0))
        return parts[:1]
    return parts.sum(0, keepdim=True)


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Record launches inside the block in the list it yields, and launch nothing; tensors may be on the meta device."""
    before, _notes.made = _notes.made, []
    try:
        yield _notes.made
    finally:
        _notes.made = before


def bytes_of(mask: Tensor | None) -> Tensor | None:
    """Return a boolean mask as contiguous bytes, which is what kernels read."""
    return None if mask is None else mask.contiguous().view(torch.uint8)
