"""Attention's share of the time and of the peak memory of whole forward passes, measured at each length.

Two kinds of passes take turns: plain ones, for the time; and ones with clocks around attention modules and around the
projections and norms in them, for the shares. Attention without these parts is the mixing, which another mixer would
replace. Shares are taken within one pass, and then the median of many passes: a busy machine slows all parts of a pass
alike. Where a pass takes long, clocks cost nothing in comparison and the second kind gives the time too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ...types import Record
from ..bench.timing import PATIENCE, peak_memory, quartile, upper_quartile
from .amdahl import bound
from .attention_modules import AttentionModule, torch_projections

LONG_PASS = 0.2
"""For passes of at least this many seconds clocks cost nothing in comparison, and one pass is enough warm-up."""
LEAST_TURNS, MOST_TURNS = 3, 40
SPREAD = 0.1
"""Passes are repeated until their quartiles are apart by less than this, relative to the lower one."""
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
"""What models raise, MixerError among them, for an input they do not take."""
Call = Callable[[], Any]


@dataclass(frozen=True)
class Share:
    """The measurement at one length.

    Args:
        seconds, attention, mixing: of a forward pass; spent in attention modules; spent in them on mixing tokens,
            without projections and norms.
        peak, without: bytes of one pass at its peak, weights aside; and of one whose attention modules return zeros at
            once. None: this system does not report it.
        passes: how many were timed.
        high: the upper quartile of the passes, of which ``seconds`` is the lower.
    """

    length: int
    tokens: int
    seconds: float
    attention: float
    mixing: float
    peak: int | None
    without: int | None
    passes: int
    high: float | None = None

    @property
    def spread(self) -> float:
        """By how much the upper quartile of the passes is above the lower one, relative to it."""
        return (self.high or self.seconds) / self.seconds - 1

    @property
    def attention_share(self) -> float:
        """Attention's share of the time."""
        return min(self.attention / self.seconds, 1.0)

    @property
    def mixing_share(self) -> float:
        """Mixing's share of the time, which is what a replacement can change."""
        return min(self.mixing / self.seconds, 0.999)

    @property
    def memory_share(self) -> float | None:
        """The part of the peak that is saved without attention."""
        return None if not self.peak or self.without is None else min(max(1 - self.without / self.peak, 0.0), 1.0)

    @property
    def bound(self) -> float:
        """How many times as fast the model would be if mixing were free. It is no measurement of any mixer."""
        return bound(self.mixing_share)

    @property
    def limit(self) -> float:
        """How many times as fast it would be without its attention modules, projections included."""
        return bound(min(self.attention_share, 0.999))

    def to_json(self) -> Record:
        """Return plain JSON values: seconds, bytes and shares."""
        shares = {
            "attention_share": self.attention_share,
            "mixing_share": self.mixing_share,
            "memory_share": self.memory_share,
            "bound": self.bound,
            "limit": self.limit,
        }
        return {**vars(self), **shares}


@dataclass
class Clock:
    """Measure seconds in some modules, pass by pass. On CUDA the device's own clock is read, after the pass."""

    modules: Sequence[nn.Module]
    device: str = "cpu"
    passes: list[list[tuple[Any, Any]]] = field(default_factory=list)

    @contextmanager
    def measure_pass(self) -> Iterator[None]:
        """Measure one pass."""
        begun: list[Any] = []
        self.passes.append([])
        handles = [m.register_forward_pre_hook(lambda *_: begun.append(self._read_time())) for m in self.modules]
        handles += [
            m.register_forward_hook(lambda *_: self.passes[-1].append((begun.pop(), self._read_time())))
            for m in self.modules
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def seconds(self) -> list[float]:
        """Return the seconds of each pass."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return [sum(a.elapsed_time(b) for a, b in one) / 1e3 for one in self.passes]
        return [sum(b - a for a, b in one) for one in self.passes]

    def _read_time(self) -> Any:
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@torch.no_grad()
def measure_share(
    model: nn.Module,
    modules: list[AttentionModule],
    call: Call,
    length: int,
    tokens: int,
    *,
    budget: float,
    device: str = "cpu",
) -> Share:
    """Time ``call``, a forward pass of ``model``, in about ``budget`` seconds, a few times at least."""
    with plain_torch(modules):
        attention = Clock([m.module for m in modules], device)
        kept = Clock([part for m in modules for part in m.list_kept_modules()], device)
        first = time_pass(call, (attention, kept), device)
        long = first >= LONG_PASS
        clocked = [first]
        peak = peak_memory(call, device=device)
        without = _peak_without(modules, call, device)
        plain, turns, began = [first] if long else [], 0, time.perf_counter()
        while turns < (1 if long else LEAST_TURNS) or (
            turns < MOST_TURNS and time.perf_counter() - began < budget * (PATIENCE if _varies_widely(plain) else 1)
        ):
            clocked.append(time_pass(call, (attention, kept), device))
            plain.append(clocked[-1] if long else time_pass(call, (), device))
            turns += 1
        aside = _torch_kept(modules, call, device)
    skip = 0 if long else 1  # the first pass warmed up
    passes = list(zip(attention.seconds(), kept.seconds(), clocked, strict=True))[skip:]
    inside = median(min(spent / whole, 1.0) for spent, _, whole in passes)
    mixing = median(max(spent - own - aside, 0.0) / whole for spent, own, whole in passes)
    seconds = quartile(sorted(plain))
    high = upper_quartile(sorted(plain))
    return Share(length, tokens, seconds, inside * seconds, mixing * seconds, peak, without, len(plain), high)


def _varies_widely(seconds: list[float]) -> bool:
    ordered = sorted(seconds)
    return bool(ordered) and upper_quartile(ordered) > (1 + SPREAD) * quartile(ordered)


def time_pass(call: Call, clocks: Sequence[Clock], device: str) -> float:
    """Time one pass under these clocks."""
    with ExitStack() as stack:
        for clock in clocks:
            stack.enter_context(clock.measure_pass())
        start = _synchronised_time(device)
        call()
        return _synchronised_time(device) - start


def _synchronised_time(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_without(modules: list[AttentionModule], call: Call, device: str) -> int | None:
    """Measure the peak of a pass whose attention modules return zeros of the right shapes."""
    kinds = _outputs(modules, call)
    used = [m.module for m in modules if id(m.module) in kinds]
    for module in used:
        module.forward = _zeros(kinds[id(module)])
    try:
        return peak_memory(call, device=device)
    finally:
        for module in used:
            del module.forward


@dataclass(frozen=True)
class _Kind:
    """The shape, dtype and device of a tensor, without its contents."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _outputs(modules: list[AttentionModule], call: Call) -> dict[int, object]:
    """Return the structure of each module's output, without its contents."""
    found: dict[int, object] = {}

    def keep(module: nn.Module, given: object, output: object) -> None:
        found[id(module)] = pytree.tree_map(
            lambda y: _Kind(y.shape, y.dtype, y.device) if isinstance(y, Tensor) else y, output
        )

    _call_with_hooks(modules, call, lambda m: m.register_forward_hook(keep))
    return found


def _zeros(kinds: object) -> Call:
    """Return a forward that gives zeros, written to, so that the memory is really allocated."""

    def make_zeros(kind: object) -> object:
        return (
            torch.empty(kind.shape, dtype=kind.dtype, device=kind.device).fill_(0) if isinstance(kind, _Kind) else kind
        )

    return lambda *args, **named: pytree.tree_map(make_zeros, kinds)


def _torch_kept(modules: list[AttentionModule], call: Call, device: str) -> float:
    """Time the projections of all ``nn.MultiheadAttention``, which has no modules for them that could be clocked."""
    chosen = [m for m in modules if m.family == "torch"]
    if not chosen:
        return 0.0
    calls: list[Call] = []
    _call_with_hooks(
        chosen,
        call,
        lambda m: m.register_forward_pre_hook(
            lambda m, a, k: calls.append(torch_projections(m, a, k)), with_kwargs=True
        ),
    )

    def run() -> None:
        for each in calls:
            each()

    first = time_pass(run, (), device)
    return min(first, *(time_pass(run, (), device) for _ in range(2 if first >= LONG_PASS else 9)))


def _call_with_hooks(modules: list[AttentionModule], call: Call, hook: Callable[[nn.Module], RemovableHandle]) -> None:
    handles = [hook(m.module) for m in modules]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def plain_torch(modules: list[AttentionModule]) -> Iterator[None]:
    """Disable the fused inference pass of ``nn.TransformerEncoderLayer``, inside which nothing can be clocked."""
    was = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(was and all(m.family != "torch" for m in modules))
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)
