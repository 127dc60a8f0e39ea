"""Forward passes that are computed again inside a backward pass, as gradient checkpointing does.

They must take the paths that the first pass took, although the blocks around it may have ended or another thread runs
them, and must not do again what the first pass did beside its outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache, wraps
from operator import methodcaller
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import MixerError

Given = ParamSpec("Given")
Found = TypeVar("Found")
_compiling, _graph_task = torch.compiler.is_compiling, torch._C._current_graph_task_id
_grad_mode, _hooks = torch.is_grad_enabled, torch._C._autograd._top_saved_tensors_default_hooks
_functorch = torch._C._functorch.peek_interpreter_stack
PASSES = 64
"""First passes of a module that are remembered, of those that may be computed again."""
SAMPLES = 256
"""Numbers of an input by which its pass is found again."""


class Setting(NamedTuple):
    """Something that a ``with`` block sets and a forward pass reads: how to read it, and a block that sets it again."""

    read: Callable[[], object]
    use: Callable[[Any], AbstractContextManager[object]]


SETTINGS: list[Setting] = []
"""Every such setting; each is added where it is defined."""
_read = methodcaller("read")


def is_recomputing() -> bool:
    """Return whether a backward pass runs in this thread, which means that a forward pass is one computed again."""
    return not _compiling() and _graph_task() != -1


def as_now(call: Callable[Given, Found]) -> Callable[Given, Found]:
    """Return ``call`` bound to the settings of this moment, for whenever and wherever it runs."""
    now = [*map(_read, SETTINGS)]

    def run(*args: Given.args, **given: Given.kwargs) -> Found:
        return _call_under(now, call, *args, **given)

    return run


class Passes:
    """What the last first passes of one module read, each found again by the numbers of its input.

    A module of a loop is applied several times before the backward pass computes any of them again.
    """

    def __init__(self) -> None:
        self._kept: deque[_Pass] = deque(maxlen=PASSES)

    def __reduce__(self) -> tuple[object, ...]:
        return Passes, ()  # a copy of the module has made no pass

    def first(self, who: str, x: Tensor, value: Found) -> Found:
        """Return ``value``; in a recomputed pass, the value of the first pass over the same x.

        Raises:
            MixerError: none of the remembered passes had this x; ``who`` is the module's name.
        """
        if _compiling():
            return value
        if not is_recomputing():
            self.add(x, value)
            return value
        if not self._kept:
            return value
        found = self.find(x)
        if found is None:
            raise MixerError(
                f"{who}: checkpointing computes a pass again that none of the last {PASSES} passes was; call backward "
                "after fewer passes."
            )
        return found[0]

    def add(self, x: Tensor, value: object) -> None:
        """Remember ``value`` of a first pass over x, if it runs in a checkpoint and may be computed again."""
        if (_grad_mode() and _hooks(True) is None) or _functorch() is not None or x.is_meta:
            return
        self._kept.append(_Pass(_sample(x), x.shape, value))

    def find(self, x: Tensor) -> tuple[Any] | None:
        """Return the value of the first pass over x, in a tuple, or None; of equal passes the last not yet found."""
        same = [each for each in self._kept if each.shape == x.shape]
        if not same or _functorch() is not None:
            return None
        sample = _sample(x)
        off = torch.stack([(each.sample - sample).abs().max() for each in same]).tolist()
        nearest = min(off)
        if not nearest <= 0.01 * max(1e-30, float(sample.abs().max())):  # kernels of a GPU may sum in another order
            return None
        equal = [each for each, distance in zip(same, off, strict=True) if distance == nearest]
        found = next((each for each in reversed(equal) if not each.found), equal[-1])
        found.found = True
        return (found.value,)


class _Pass:
    def __init__(self, sample: Tensor, shape: torch.Size, value: object):
        self.sample, self.shape, self.value, self.found = sample, shape, value, False


def _sample(x: Tensor) -> Tensor:
    with torch.no_grad(), _disable_current_modes():
        return x[_places(x.shape, x.device)].float().nan_to_num() if x.numel() else x.new_zeros(1).float()


@lru_cache(64)
def _places(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Return the indices of numbers spread over a tensor of this shape, a tensor of them for each dimension."""
    total = shape.numel()
    at = torch.arange(min(SAMPLES, total), dtype=torch.int64, device=device) * 0x9E3779B1 % total
    return torch.unravel_index(at, shape)


def remembers_settings(forward: Callable[Given, Found]) -> Callable[Given, Found]:
    """Decorate the ``forward`` of a module, which then computes again under the settings of its first pass.

    Torch's checkpointing hands on nothing but the random numbers and autocast.
    """

    @wraps(forward)
    def run(self: Any, *args: Any, **given: Any) -> Found:
        if _compiling():
            return forward(self, *args, **given)
        kept, x = self.__dict__, args[0] if args else given.get("x")
        if _graph_task() == -1:
            now = [*map(_read, SETTINGS)]
            if self.training and kept.get("_settings", now) != now:
                kept.setdefault("_passes_under", Passes())
            if "_passes_under" in kept and self.training and isinstance(x, Tensor):
                kept["_passes_under"].add(x, now)
            else:
                kept["_settings"] = now
            return forward(self, *args, **given)
        found = kept["_passes_under"].find(x) if "_passes_under" in kept else None
        return _call_under(found[0] if found else kept.get("_settings", ()), forward, self, *args, **given)

    return run  # type: ignore[return-value]  # mypy does not take self out of the parameters


def _call_under(
    values: Sequence[object], call: Callable[Given, Found], *args: Given.args, **given: Given.kwargs
) -> Found:
    with ExitStack() as stack:
        for setting, value in zip(SETTINGS, values, strict=False):
            stack.enter_context(setting.use(value))
        return call(*args, **given)
