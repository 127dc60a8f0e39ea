"""This machine: its processor, memory and devices."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ..errors import MixerError


def cpu_name() -> str:
    """Return the processor's name, as the system reports it."""
    line = next((line for line in read_text("/proc/cpuinfo").splitlines() if line.startswith("model name")), None)
    return line.split(":", 1)[1].strip() if line else platform.processor() or platform.machine()


@contextlib.contextmanager
def torch_threads(n: int | None) -> Iterator[None]:
    """Run torch on n threads inside; None: on as many as outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(n or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_first_rank() -> bool:
    """Return whether this process is the first, or the only one, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def peak_mib(device: torch.device) -> float:
    """Return the most memory held so far in MiB: torch's allocations on the GPU, else the process's resident high-water
    mark.
    """
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    held = process_memory("VmHWM")
    if held is not None:
        return round(held / 2**20, 1)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 1024), 1)


def process_memory(field: str) -> int | None:
    """Return the bytes of resident memory: VmRSS, those of now; VmHWM, the most so far; None where not reported."""
    return _read_field("/proc/self/status", field)


def reset_peak(device: torch.device) -> bool:
    """Reset the high-water mark, so that each run has its own peak; return False where the system does not allow it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def memory_total() -> int | None:
    """Return the bytes of memory of this machine, or None where it is not reported."""
    return _read_field("/proc/meminfo", "MemTotal")


def memory_available(device: str = "cpu") -> int | None:
    """Return the bytes of memory that are still available, or None where it is not reported."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else _read_field("/proc/meminfo", "MemAvailable")


def busy_cores(seconds: float = 0.5) -> float | None:
    """Return how many cores are at work while this process sleeps for a moment, or None where it is not reported."""

    def busy_ticks() -> float | None:
        counts = read_text("/proc/stat").partition("\n")[0].split()[1:]
        idle = (3, 4)  # idle and waiting for disks; the last two are part of the first
        return sum(float(n) for i, n in enumerate(counts[:8]) if i not in idle) if counts else None

    before, began = busy_ticks(), time.perf_counter()
    time.sleep(seconds)
    after, ticks = busy_ticks(), os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    return None if before is None or after is None else (after - before) / ticks / (time.perf_counter() - began)


def _read_field(file: str, field: str) -> int | None:
    """Return the bytes that a field of one of the kernel's tables holds, which are in KiB; None where there is none."""
    line = next((line for line in read_text(file).splitlines() if line.startswith(field + ":")), None)
    value = line.split()[1] if line else ""
    return int(value) * 1024 if value.isdigit() else None


def read_text(path: str) -> str:
    """Return the contents of a file, or an empty string if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def pick_device(name: str) -> torch.device:
    """Return the torch device of a name; "auto" is CUDA where it works, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MixerError(f"device={name!r} is unknown; choose 'auto', 'cpu' or 'cuda'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MixerError(f"device={name!r}: torch {torch.__version__} sees no CUDA device here; use 'cpu' or 'auto'.")
    try:
        torch.zeros((), device=device).item()
    except Exception as why:  # each device raises its own
        said = " ".join(str(why).split())[:100]
        raise MixerError(f"device={name!r} holds no numbers here ({said}); choose 'auto', 'cpu' or 'cuda'.") from None
    return device


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return a context of autocast to "bf16" or "fp16", disabled for any other precision."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision in ("bf16", "fp16"))
