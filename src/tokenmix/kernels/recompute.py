"""Forward passes that are computed again inside a backward pass, as gradient checkpointing does.

They must take the paths that the first pass took, although the blocks around it may have ended or another thread runs
them, and must not do again what the first pass did beside its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any, NamedTuple

import torch

_compiling, _graph_task = torch.compiler.is_compiling, torch._C._current_graph_task_id


class Setting(NamedTuple):
    """Something that a ``with`` block sets and a forward pass reads: how to read it, and a block that sets it again."""

    read: Callable[[], Any]
    use: Callable[[Any], AbstractContextManager[Any]]


SETTINGS: list[Setting] = []
"""Every such setting; each is added where it is defined."""


def recomputing() -> bool:
    """Return whether a backward pass runs in this thread, which means that a forward pass is one computed again."""
    return not _compiling() and _graph_task() != -1


def as_now(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` bound to the settings of this moment, for whenever and wherever it runs."""
    now = [setting.read() for setting in SETTINGS]

    def run(*args: Any, **given: Any) -> Any:
        return _under(now, call, *args, **given)

    return run


def remembers_settings(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the ``forward`` of a module, which then computes again under the settings of its last first pass.

    Torch's checkpointing hands on nothing but the random numbers and autocast.
    """

    @wraps(forward)
    def run(self: Any, *args: Any, **given: Any) -> Any:
        if _compiling():
            return forward(self, *args, **given)
        if _graph_task() == -1:
            self.__dict__["_settings"] = [setting.read() for setting in SETTINGS]
            return forward(self, *args, **given)
        return _under(self.__dict__.get("_settings", ()), forward, self, *args, **given)

    return run


def _under(values: Sequence[Any], call: Callable[..., Any], *args: Any, **given: Any) -> Any:
    with ExitStack() as stack:
        for setting, value in zip(SETTINGS, values, strict=False):
            stack.enter_context(setting.use(value))
        return call(*args, **given)
