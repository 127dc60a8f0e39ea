"""What the machine can do at best, probed in the run that is judged by it, and how it is set up.

A time is only worth something beside its floor: the bytes an operation must move over the copy bandwidth, or its FLOPs over the rate of matrix products,
whichever is longer.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .timing import measure, sampler

MIB = 2**20
COPIES = (4 * MIB, 32 * MIB, 128 * MIB, 1024 * MIB)
"""Bytes read and written by one copy: from what caches hold to what none does."""
GEMM, EXP = 1024, MIB // 4
ON_CUDA = 8
"""Matrices there are so many times as wide, and exp takes the square of it more numbers: small ones would leave the device idle."""
ENVIRONMENT = ("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD", "OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "TOKENMIX_", "PYTORCH_", "CUDA_")


@dataclass(frozen=True)
class Limits:
    """Measured rates: bytes per second of copies by the bytes they move, FLOP per second of matrix products by route, exp() per second."""

    copy: dict[int, float]
    gemm: dict[str, float]
    exp: float

    def bandwidth(self, moved: float) -> tuple[int, float]:
        """The copy nearest in size to ``moved`` bytes, and its rate: what fits in a cache is judged by the cache."""
        size = min(self.copy, key=lambda n: abs(math.log(n / max(moved, 1))))
        return size, self.copy[size]

    def best_gemm(self, dtype: str) -> tuple[str, float]:
        """The fastest route to a matrix product in this dtype."""
        routes = {name: rate for name, rate in self.gemm.items() if name.startswith(dtype)} or self.gemm
        name = max(routes, key=lambda n: routes[n])
        return name, routes[name]

    def floor(self, moved: float, flops: float, dtype: str) -> tuple[float, str]:
        """The least seconds, and what sets it: "copy" or "gemm"."""
        by_copy, by_gemm = moved / self.bandwidth(moved)[1], flops / self.best_gemm(dtype)[1]
        return (by_copy, "copy") if by_copy >= by_gemm else (by_gemm, "gemm")

    def to_json(self) -> dict[str, Any]:
        """Rates with their units in the names."""
        return {
            "copy_bytes_per_s": {f"{size // MIB} MiB": rate for size, rate in self.copy.items()},
            "gemm_flop_per_s": dict(self.gemm),
            "exp_per_s": self.exp,
        }


def probe(device: str = "cpu", *, dtypes: tuple[str, ...] = ("float32", "bfloat16"), budget: float = 4.0, largest: int = COPIES[-1]) -> Limits:
    """Measure the limits in about ``budget`` seconds; ``largest`` caps the bytes of a copy."""
    sizes = [n for n in COPIES if n <= largest] or [largest]
    calls: dict[str, tuple[Callable[[], Any], float]] = {}
    for size in sizes:
        a = torch.ones(size // 8, device=device)
        calls[f"copy {size}"] = (_copier(a, torch.empty_like(a)), 8.0 * a.numel())
    times = ON_CUDA if device == "cuda" else 1
    for dtype in dtypes:
        for route, call in _products(dtype, device, GEMM * times).items():
            calls[f"{dtype} {route}"] = (call, 2.0 * (GEMM * times) ** 3)
    x = torch.linspace(-10, 0, EXP * times**2, device=device)
    out = torch.empty_like(x)
    calls["exp"] = (lambda: torch.exp(x, out=out), float(x.numel()))
    with torch.no_grad():
        found = measure({name: sampler(call, device=device) for name, (call, _) in calls.items()}, budget=budget)
    rate = {name: amount / found[name].wall_min for name, (_, amount) in calls.items()}
    copies = {size: rate.pop(f"copy {size}") for size in sizes}
    return Limits(copies, {n: r for n, r in rate.items() if n != "exp"}, rate["exp"])


def _copier(source: torch.Tensor, target: torch.Tensor) -> Callable[[], Any]:
    return lambda: target.copy_(source)


def _products(dtype: str, device: str, n: int) -> dict[str, Callable[[], Any]]:
    """The routes to a square matrix product: torch's own and, on the CPU in float32, that of oneDNN, which ``@`` does not take."""
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
    routes: dict[str, Callable[[], Any]] = {"matmul": lambda: a @ b}
    if device == "cpu" and dtype == "float32" and torch.backends.mkldnn.is_available():
        image, kernel = a[None], b[:, :, None]
        routes["oneDNN"] = lambda: torch.nn.functional.conv1d(image, kernel)
    return routes


def machine(device: str = "cpu") -> dict[str, Any]:
    """Name, cores, threads, memory, versions, kernels in use, and every setting that is known to change speed."""
    from .. import __version__
    from ..kernels import cpu, triton

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory_total(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mkldnn": torch.backends.mkldnn.is_available(),
        "mkl": torch.backends.mkl.is_available(),
        "tokenmix": __version__,
        "kernels": {"cpu": cpu.isa() or f"none: {cpu.why_not()}", "triton": triton.why_not() or "ready"},
        "allocator": allocator(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT)},
    }


def allocator() -> str:
    """How memory is allocated, in words: large tensors that are mapped anew in each call cost more than many operations on them."""
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("MALLOC_") or k in ("GLIBC_TUNABLES", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE")]
    name = " ".join(part for part in platform.libc_ver() if part) or "C library"
    pages = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    huge = pages[pages.find("[") + 1 : pages.find("]")] if "[" in pages else "unknown"
    return f"{name}, {', '.join(settings) or 'default settings'}; transparent huge pages: {huge}"


def memory_total() -> int | None:
    """Bytes of memory of this machine, where it says."""
    return _meminfo("MemTotal")


def memory_available(device: str = "cpu") -> int | None:
    """Bytes that can still be had, where the system says."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else _meminfo("MemAvailable")


def _meminfo(field: str) -> int | None:
    line = next((line for line in _read("/proc/meminfo").splitlines() if line.startswith(field + ":")), None)
    return int(line.split()[1]) * 1024 if line else None


def _cpu_name() -> str:
    line = next((line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")), None)
    return line.split(":", 1)[1].strip() if line else platform.processor() or platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
