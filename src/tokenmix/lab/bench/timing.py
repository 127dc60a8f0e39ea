"""Time calls against each other in one process, and measure the memory one call takes.

The load of a machine varies, so variants are timed in turns: a slow period affects all of them, and ratios survive it.
The lower quartile of many samples represents a call; the minimum and the CPU time (of all threads, so up to threads x
wall) are given beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ...system.machine import process_memory, reset_peak

Call = Callable[[], Any]
Sample = tuple[float, float]
Sampler = Callable[[int], Sample]
"""A function of the number of calls to make: seconds of wall clock and of CPU time per call."""

INNER_SECONDS = 0.004
"""A sample of a short call repeats it for about this long, far above the cost of the clock and the loop."""
LONG_CALL = 0.2
"""For calls of at least this many seconds one call is enough warm-up."""
MAX_INNER, MIN_ROUNDS, MAX_SAMPLES = 5000, 3, 8
PATIENCE = 3
"""Timings that have not settled take up to this many times their budget."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: lower quartile and minimum of wall clock, lower quartile of CPU time; samples, and calls in
    each; upper quartile of wall clock.

    ``ratios`` has, for each turn, the seconds of the call that this one was paired with over its own, if any.
    """

    wall: float
    wall_min: float
    cpu: float
    samples: int
    inner: int
    wall_high: float
    ratios: tuple[float, ...] = ()

    @property
    def spread(self) -> float:
        """By how much the upper quartile is above the lower one, relative to it."""
        return self.wall_high / self.wall - 1

    @property
    def ratio(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the ratios."""
        ordered = sorted(self.ratios)
        return quartile(ordered), median(ordered), upper_quartile(ordered)


def sampler(
    call: Call, *, device: str = "cpu", scope: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
) -> Sampler:
    """Return a sampler of ``call``; ``scope()`` is entered around the calls, outside of the timed region.

    On CUDA the wall clock is that of events on the device.
    """

    def on_cpu(n: int) -> Sample:
        with scope():
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(n):
                call()
            return (time.perf_counter() - wall) / n, (time.process_time() - cpu) / n

    def on_cuda(n: int) -> Sample:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with scope():
            torch.cuda.synchronize()
            cpu = time.process_time()
            begin.record()
            for _ in range(n):
                call()
            end.record()
            spent = time.process_time() - cpu
            torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / n, spent / n

    return on_cuda if device == "cuda" else on_cpu


def measure(
    samplers: dict[str, Sampler],
    *,
    budget: float,
    against: str | None = None,
    warm: bool = False,
    known: dict[str, float] | None = None,
    settle: float | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Timing]:
    """Time every sampler in turns until ``budget`` seconds are spent, at least ``MIN_ROUNDS`` turns.

    Turns go forwards and backwards through the list.

    Args:
        against: a name; a turn then times it beside each other one, in alternating order, and each such pair gives a
            ratio: the load of the machine changes both alike, so ratios settle where seconds do not.
        warm: make one untimed call before each sample; for turns that change the process.
        known: seconds that a call took already; a long one is not warmed up again.
        settle: turns go on until every spread, of ratios where there are some, is below this, for ``PATIENCE`` times
            the budget at most.
        tell: called with what is happening.
    """
    single = dict(known or {})
    for name, sample in samplers.items():  # the first call warms up, the second says how long a call takes
        tell(f"warming up {name}")
        first = single[name] if single.get(name, 0.0) >= LONG_CALL else sample(1)[0]
        single[name] = max(sample(1)[0] if first < LONG_CALL else first, 1e-7)
    inner = {name: max(1, min(MAX_INNER, round(INNER_SECONDS / t))) for name, t in single.items()}
    pairs = [(against, name) for name in samplers if name != against] if against in samplers else []
    groups: list[tuple[str, ...]] = [*pairs] or [(name,) for name in samplers]
    turn = sum(single[name] * inner[name] for group in groups for name in group)
    most = MAX_SAMPLES if budget > 0.1 * turn else 1  # a budget that one turn exceeds by far buys no more samples
    often = {
        name: max(1, min(most, int(0.1 * turn / (t * inner[name])))) for name, t in single.items()
    }  # short calls beside a long one
    taken: dict[str, list[Sample]] = {name: [] for name in samplers}
    ratios: dict[str, list[float]] = {name: [] for _, name in pairs}
    start, rounds = time.perf_counter(), 0
    while (
        rounds < MIN_ROUNDS
        or (spent := time.perf_counter() - start) < budget
        or (settle is not None and spent < PATIENCE * budget and _worst_spread(taken, ratios) > settle)
    ):
        tell(f"turn {rounds + 1}, {time.perf_counter() - start:.0f} of {budget:.0f} s")
        for group in groups if rounds % 2 == 0 else reversed(groups):
            now = {}
            for name in group if rounds % 2 == 0 else reversed(group):
                if warm:
                    samplers[name](1)
                taken[name] += [samplers[name](inner[name]) for _ in range(often[name])]
                now[name] = median(wall for wall, _ in taken[name][-often[name] :])
            if len(group) == 2:
                ratios[group[1]].append(now[group[0]] / now[group[1]])
        rounds += 1
    return {name: _summary(samples, inner[name], ratios.get(name, ())) for name, samples in taken.items()}


def expected_seconds(calls: Sequence[float], budget: float, *, against: bool = False) -> tuple[float, float]:
    """Return the least and the most seconds that ``measure`` takes for calls of these seconds, with ``settle``.

    It is about the budget where several turns fit into it; the upper number holds where the timings do not settle.

    Args:
        against: whether each other call is paired with the first one.
    """
    inner = [max(1, min(MAX_INNER, round(INNER_SECONDS / t))) * t for t in calls]
    warm = sum(2 * t if t < LONG_CALL else t for t in calls)
    turn = sum(inner) + (inner[0] * max(len(inner) - 2, 0) if against and inner else 0.0)
    return warm + max(budget, MIN_ROUNDS * turn), warm + max(PATIENCE * budget, MIN_ROUNDS * turn) + turn


def _worst_spread(taken: dict[str, list[Sample]], ratios: dict[str, list[float]]) -> float:
    walls = [sorted(wall for wall, _ in samples) for samples in taken.values()]
    found = [sorted(values) for values in ratios.values()] or walls
    return max((upper_quartile(values) / quartile(values) - 1 for values in found), default=0.0)


def _summary(samples: list[Sample], inner: int, ratios: Sequence[float]) -> Timing:
    wall, cpu = (sorted(s[i] for s in samples) for i in (0, 1))
    return Timing(quartile(wall), wall[0], quartile(cpu), len(samples), inner, upper_quartile(wall), tuple(ratios))


def quartile(values: list[float]) -> float:
    """Return the lower quartile of sorted values."""
    return values[len(values) // 4]


def upper_quartile(values: list[float]) -> float:
    """Return the upper quartile of sorted values."""
    return values[3 * len(values) // 4]


def peak_memory(
    call: Call, *, device: str = "cpu", scope: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
) -> int | None:
    """Return the bytes one call takes at its peak beyond what was there before, its result included.

    It is None where this system does not report it. The call must have been made before: what is allocated once, such
    as workspaces, is not counted. On Linux the kernel's high-water mark of resident memory is reset before the call,
    and free memory that the C library keeps from earlier calls is returned first.
    """
    with scope():
        gc.collect()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            kept = call()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        if not reset_peak(torch.device("cpu")):
            return None
        resident = process_memory("VmRSS") or 0
        kept = call()
        peak = process_memory("VmHWM") or 0
        del kept
    return max(0, peak - resident)


def exponent(lengths: list[int], seconds: list[float]) -> float | None:
    """Return the slope of log time over log length by least squares: 1 is linear, 2 quadratic.

    It is None with fewer than two lengths.
    """
    if len(set(lengths)) < 2:
        return None
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (lengths, seconds))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())
