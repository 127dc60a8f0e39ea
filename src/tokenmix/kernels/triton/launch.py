"""Launch Triton kernels, or only record what would be launched.

Launchers call only ``launch``, so running them on meta tensors under ``record_launches()`` records the configurations
they choose (dtypes, constants, warps, stages). ``aot.py`` compiles these, and no second table can disagree with them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...types import Options
from . import INTERPRETED

if TYPE_CHECKING:
    from triton import JITFunction


class Launch(NamedTuple):
    """Hold one launch: the kernel, its arguments by name (constants included), the compiler's options, and its size."""

    kernel: JITFunction
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
