"""The machine's limits, measured in the run that they judge, and how the machine is set up.

A time is compared with its lower bound: the time its bytes take at the fastest rate of this machine, or its FLOPs at
the rate of the fastest matrix product, whichever is longer. A call must not beat that bound, so every rate is the best
of several routes and of all probes of a run.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...system.machine import cpu_name, memory_total, read_text
from ...system.version import __version__
from ...types import Record
from .flops import Work
from .timing import measure, sampler

MIB = 2**20
SIZES = tuple(n * MIB for n in (1, 4, 8, 16, 32, 64, 128, 1024))
"""Bytes that a probe of the memory touches, from what caches hold to what none does."""
GEMM, EXP = 1024, MIB // 4
SHAPES = ((1, 1, 1), (4, 0.5, 0.5))
"""Rows, the summed length and columns of the products that are probed, in units of ``GEMM``."""
ON_CUDA = 8
"""On CUDA, matrices are this many times as wide, and exp takes its square times as many numbers, to keep the device
busy.
"""
ENVIRONMENT = (
    "MALLOC_",
    "GLIBC_TUNABLES",
    "THP_MEM_ALLOC_ENABLE",
    "LD_PRELOAD",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "DNNL_",
    "TOKENMIX_",
    "PYTORCH_",
    "CUDA_",
)

Call = Callable[[], Any]


@dataclass(frozen=True)
class Rates:
    """Bytes per second: read only, written only, and both together, at the fastest mixture of the two."""

    read: float
    write: float
    both: float

    def best(self, other: Rates) -> Rates:
        """Return the larger of each rate. What reads and writes at some rate could read at that rate alone."""
        both = max(self.both, other.both)
        return Rates(max(self.read, other.read, both), max(self.write, other.write), both)

    def seconds(self, work: Work) -> float:
        """Return the least time for these bytes: reads alone, writes alone and all together each take theirs."""
        return max(work.read / self.read, work.written / self.write, work.bytes_moved / self.both)


@dataclass(frozen=True)
class Limits:
    """Measured rates: of memory by the bytes touched, FLOP per second of matrix products by route, exp() per second."""

    memory: dict[int, Rates]
    gemm: dict[str, float]
    exp: float

    def rates(self, held: float) -> Rates:
        """Return the rates for a call that touches ``held`` bytes.

        They are those of the largest probe that touches no more, or of a larger one that was faster nevertheless.
        """
        begin = max((size for size in self.memory if size <= held), default=min(self.memory))
        found = self.memory[begin]
        for size, rates in self.memory.items():
            found = found.best(rates) if size >= begin else found
        return found

    def best_gemm(self, dtype: str) -> tuple[str, float]:
        """Return the fastest route to a matrix product in this dtype, and its rate."""
        routes = {name: rate for name, rate in self.gemm.items() if name.startswith(dtype)} or self.gemm
        name = max(routes, key=lambda n: routes[n])
        return name, routes[name]

    def floor(self, work: Work, dtype: str) -> tuple[float, str]:
        """Return the least seconds, and what sets them: "copy" or "gemm"."""
        by_copy, by_gemm = self.rates(work.held).seconds(work), work.flops / self.best_gemm(dtype)[1]
        return (by_copy, "copy") if by_copy >= by_gemm else (by_gemm, "gemm")

    def best(self, other: Limits) -> Limits:
        """Return the faster of two probes, rate by rate: other processes can only have slowed a probe down."""
        memory = {size: rates.best(other.memory[size]) for size, rates in self.memory.items()}
        return Limits(
            memory, {name: max(rate, other.gemm[name]) for name, rate in self.gemm.items()}, max(self.exp, other.exp)
        )

    def to_json(self) -> Record:
        """Return the rates with their units in the names."""
        of = {
            kind: {_size(n): getattr(rates, kind) for n, rates in self.memory.items()}
            for kind in ("read", "write", "both")
        }
        return {
            "read_bytes_per_s": of["read"],
            "write_bytes_per_s": of["write"],
            "copy_bytes_per_s": of["both"],
            "gemm_flop_per_s": dict(self.gemm),
            "exp_per_s": self.exp,
        }


def _size(n: int) -> str:
    return f"{n / MIB:g} MiB"


def probe(
    device: str = "cpu",
    *,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    budget: float = 4.0,
    largest: int = SIZES[-1],
) -> Limits:
    """Measure the limits in about ``budget`` seconds; ``largest`` caps the bytes that are touched."""
    sizes = [n for n in SIZES if n <= largest] or [largest]
    calls: dict[str, tuple[Call, float]] = {}
    for size in sizes:
        for kind, route, call in _memory(size, device):
            calls[f"{kind} {route} {size}"] = (call, float(size))
    times = ON_CUDA if device == "cuda" else 1
    for dtype in dtypes:
        for m, k, n in ((int(part * GEMM * times) for part in shape) for shape in SHAPES):
            for route, call in _products(dtype, device, m, k, n).items():
                calls[f"{dtype} {route} {m}x{k}x{n}"] = (call, 2.0 * m * k * n)
    x = torch.linspace(-10, 0, EXP * times**2, device=device)
    out = torch.empty_like(x)
    calls["exp"] = (lambda: torch.exp(x, out=out), float(x.numel()))
    with torch.no_grad():
        found = measure({name: sampler(call, device=device) for name, (call, _) in calls.items()}, budget=budget)
    rate = {name: amount / found[name].wall_min for name, (_, amount) in calls.items()}
    exp, memory = rate.pop("exp"), {}
    for size in sizes:
        read, write, both = (
            max(rate.pop(n) for n in list(rate) if n.startswith(f"{kind} ") and n.endswith(f" {size}"))
            for kind in ("read", "write", "both")
        )
        memory[size] = Rates(max(read, both), write, both)
    return Limits(memory, _best_shape(rate), exp)


def _best_shape(rate: dict[str, float]) -> dict[str, float]:
    """Return the rate of each route at the shape that suits it best."""
    routes = list(dict.fromkeys(name.rpartition(" ")[0] for name in rate))
    return {route: max(r for name, r in rate.items() if name.rpartition(" ")[0] == route) for route in routes}


def _memory(size: int, device: str) -> list[tuple[str, str, Call]]:
    """Return calls that touch ``size`` bytes of float32, by kind and route.

    All use parts of one tensor, so that nothing is allocated or mapped while they run.
    """
    whole = torch.ones(size // 4, device=device)
    rows, (a, b), (p, q, r, s) = (
        whole[: size // 4096 * 1024].view(-1, 1024),
        whole[: size // 8 * 2].chunk(2),
        whole[: size // 16 * 4].chunk(4),
    )
    found, least = torch.empty((), device=device), torch.empty(rows.shape[0], device=device)
    return [
        ("read", "sum", lambda: torch.sum(whole, 0, out=found)),
        ("read", "amax", lambda: torch.amax(rows, 1, out=least)),
        ("write", "zeros", lambda: whole.zero_()),
        ("both", "copy", lambda: a.copy_(b)),
        ("both", "lerp", lambda: torch.lerp(p, q, r, out=s)),
    ]


def _products(dtype: str, device: str, m: int, k: int, n: int) -> dict[str, Call]:
    """Return the routes to a matrix product: torch's own and, on the CPU, oneDNN's, which ``@`` does not take in
    float32.
    """
    a, b = (torch.randn(*shape, device=device).to(getattr(torch, dtype)) for shape in ((m, k), (k, n)))
    out = a.new_empty(m, n)
    routes: dict[str, Call] = {"matmul": lambda: torch.mm(a, b, out=out)}
    if device == "cpu" and dtype == "float32" and torch.backends.mkldnn.is_available():
        image, kernel, weight = a.mT.contiguous()[None], b.mT.contiguous()[:, :, None], b.mT.contiguous()
        routes["oneDNN"] = lambda: F.conv1d(image, kernel)
        if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            routes["oneDNN linear"] = lambda: torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")
    return routes


def machine(device: str = "cpu") -> Record:
    """Describe the machine: name, cores, threads, memory, versions, kernels in use, and every setting known to change
    speed.
    """
    from ...kernels import cpu, triton

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
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
    """Describe how memory is allocated.

    Large tensors that are mapped anew in each call cost more than many operations on them.
    """
    settings = [
        f"{k}={v}"
        for k, v in sorted(os.environ.items())
        if k.startswith("MALLOC_") or k in ("GLIBC_TUNABLES", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE")
    ]
    name = " ".join(part for part in platform.libc_ver() if part) or "C library"
    pages = read_text("/sys/kernel/mm/transparent_hugepage/enabled")
    huge = pages[pages.find("[") + 1 : pages.find("]")] if "[" in pages else "unknown"
    return f"{name}, {', '.join(settings) or 'default settings'}; transparent huge pages: {huge}"
