"""Load the library of C kernels, and call its functions on tensors.

The library is independent of torch: it takes pointers, sizes and strides. It is loaded with this module, after torch,
whose OpenMP threads it uses. If it is missing, stale or cannot be loaded, ``why_not()`` gives the reason and the eager
forms run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...errors import MixerError
from .build import COMMAND, LIBRARY, SOURCES, is_complete, source_hash

__all__ = [
    "DTYPES",
    "available",
    "built_from",
    "dense",
    "empty_result",
    "function",
    "isa",
    "pointers",
    "rows",
    "run_calls",
    "strides",
    "why_not",
]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that the kernels read and write; they compute in float32 or better."""

_CTYPES = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "s": ctypes.c_char_p,
}


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library and the instruction set in use, or None and the reason."""
    if os.environ.get("TOKENMIX_NO_KERNELS"):
        return None, "TOKENMIX_NO_KERNELS is set"
    other = os.environ.get("TOKENMIX_LIBRARY")  # for tests: a library built from other sources
    file = Path(other) if other else LIBRARY
    if not file.is_file():
        missing = f"the C library was not built, which needs a C compiler; build it with `{COMMAND}`"
        return None, f"{file} does not exist" if other else missing
    if not is_complete(file):
        return None, f"the C library is damaged: {file} is truncated; build it again with `{COMMAND}`"
    try:
        library = ctypes.CDLL(str(file))
        built = _text(library, "tm_hash")
    except (OSError, AttributeError) as why:
        return None, f"the C library could not be loaded ({why}); build it again with `{COMMAND}`"
    if not other and SOURCES.is_dir() and built != source_hash():
        return None, f"the C library is stale: it was built from other sources; build it again with `{COMMAND}`"
    return _choose_isa(library)


def _text(library: ctypes.CDLL, name: str) -> str:
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    return function().decode()


def _choose_isa(library: ctypes.CDLL) -> tuple[ctypes.CDLL | None, str]:
    best, wanted = _text(library, "tm_isa"), os.environ.get("TOKENMIX_ISA")
    if wanted and not hasattr(library, f"tm_{wanted}_scan_forward"):
        return None, f"TOKENMIX_ISA={wanted!r} is not an instruction set that the C library was built for"
    return library, wanted or best


_library, _found = _load()
_loaded = _library is not None  # plain globals, so that torch.compile can guard on them


def available() -> bool:
    """Say whether the C kernels can be used."""
    return _loaded


def why_not() -> str | None:
    """Say why the C kernels cannot be used; None if they can."""
    return None if _loaded else _found


def isa() -> str | None:
    """Return the instruction set in use: "v4" (AVX-512), "v3" (AVX2) or "base"; None without the library."""
    return _found if _loaded else None


def built_from() -> str | None:
    """Return the hash of the sources and flags of the library in use."""
    return None if _library is None else _text(_library, "tm_hash")


def function(name: str, signature: str) -> Callable[..., None]:
    """Look up a function of the library by name.

    Signature letters: p pointer (or None), l int64, i int, f float, d double, s packed struct.
    """
    if _library is None:
        return _raise_missing
    raw = getattr(_library, f"tm_{_found}_{name}", None)
    if raw is None:  # a library built from other sources
        return _raise_missing
    raw.argtypes, raw.restype = [_CTYPES[letter] for letter in signature], None
    return raw


def run_calls(table: bytes) -> None:
    """Run a list of the library's calls: see ``plan.Plan``."""
    if _library is None:
        _raise_missing()
    else:
        _library.tm_run(table)


def _raise_missing(*args: object) -> None:
    raise MixerError(f"backend='cpu': {_found if _library is None else 'the C library in use has no such function'}.")


def rows(a: Tensor) -> Tensor:
    """Return ``a`` with its last dimension contiguous; the kernels take the other strides as they are."""
    return a if a.stride(-1) == 1 or a.shape[-1] == 1 and a.is_contiguous() else a.contiguous()


def dense(a: Tensor | None) -> Tensor | None:
    """Return ``a`` contiguous, for arguments whose strides the kernels do not take: masks may be slices or expanded."""
    return None if a is None else a.contiguous()


_HUGE = 4 << 20  # bytes from which on huge pages are requested
_ADVICE = 14  # MADV_HUGEPAGE
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes, _madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int


def empty_result(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an empty tensor for results, on huge pages if it is large.

    The system maps a large tensor afresh in each call, and faulting it in by pages of 4 KiB may take longer than
    filling it. A system without huge pages loses nothing.
    """
    a = torch.empty(shape, dtype=dtype, device="cpu")
    if a.nbytes >= _HUGE and _madvise is not None:
        start = -(-a.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(start, a.data_ptr() + a.nbytes - start, _ADVICE)
    return a


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Return the addresses of the tensors' first elements, None for no tensor.

    The tensors must be kept alive until the call, temporary copies included.
    """
    found: list[int | None] = []
    for a in tensors:
        found.append(None if a is None else a.data_ptr())  # noqa: PERF401  (a comprehension is a call of its own)
    return found


def strides(*tensors: Tensor | None) -> list[int]:
    """Return the strides of the first two dimensions of each tensor; 0 for no tensor."""
    found: list[int] = []
    for a in tensors:
        found += (0, 0) if a is None else a.stride()[:2]
    return found
