"""Set glibc's allocator to keep the memory that is freed, which large tensors otherwise map again in each call."""

from __future__ import annotations

import ctypes
import os

MMAP_THRESHOLD, TRIM_THRESHOLD, MMAP_MAX = -3, -1, -4
"""The numbers of the parameters in malloc.h."""
KEPT = ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1))
RESET = ((MMAP_MAX, 65536), (MMAP_THRESHOLD, 32 << 20), (TRIM_THRESHOLD, 64 << 20))
"""glibc's thresholds after it has adapted them to large blocks, as it does by itself until one is set."""
ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
"""The same for a process that is about to start."""
OTHERS = {"jemalloc": "mallctl", "tcmalloc": "tc_version", "mimalloc": "mi_version"}


def why_not_kept() -> str:
    """Return why ``keep_memory`` does nothing in this process, as a phrase; "" where it works."""
    try:
        process = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no library of the whole process
        return "the C library has no mallopt"
    other = next((name for name, symbol in OTHERS.items() if hasattr(process, symbol)), None)
    if other is not None:
        return f"{other} allocates in place of the C library"
    if not hasattr(process, "mallopt") or not hasattr(process, "gnu_get_libc_version"):
        return "the C library has no mallopt"  # musl, macOS
    return ""


def keep_memory(keep: bool = True) -> bool:
    """Let this process keep the memory that it frees, which speeds up training with large tensors.

    By default glibc maps each block of 32 MiB or more afresh and unmaps it when it is freed. The system then clears its
    pages at every call, which takes longer than fast mixers compute. With this setting freed blocks stay with the
    process and are used again, so that its resident memory stays near its highest value. The setting is of the process:
    no function of this library but the commands ``train``, ``resume``, ``sweep``, ``bench``, ``advise`` and the demo
    sets it. It has no effect on blocks that worker threads allocate, which glibc serves from arenas of their own.

    Args:
        keep: False returns to glibc's thresholds for large blocks, and gives freed memory back to the system at once.

    Returns:
        Whether the setting was made. It is False where the C library is not glibc (musl, macOS, Windows) or another
        allocator is loaded; `tokenmix doctor` says which.
    """
    if why_not_kept():
        return False
    process = ctypes.CDLL(None)
    done = all([bool(process.mallopt(name, value)) for name, value in (KEPT if keep else RESET)])
    if not keep:
        process.malloc_trim(ctypes.c_size_t(0))
    return done


def keep_memory_here() -> None:
    """Keep the memory of a command and of the processes that it starts, unless the environment sets the allocator."""
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ) and keep_memory():
        os.environ.update(ENVIRONMENT)
