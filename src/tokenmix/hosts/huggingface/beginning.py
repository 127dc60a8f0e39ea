"""Initialisation under transformers, which draws module by module, marks each tensor it has drawn or loaded, and draws none twice.

Our layers begin as wholes, some of their tensors in two steps, so they are left out of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

DRAWS: dict[str, Any] = {name: f for name, f in vars(nn.init).items() if name.endswith("_") and not name.startswith("_") and callable(f)}
"""torch's own functions, as they are outside of transformers' initialisation."""


def owns_its_beginning(module: nn.Module) -> None:
    """Mark what is inside of a module that begins as a whole."""
    for part in module.modules():
        if part is not module:
            part.begun_by_owner = True  # type: ignore[assignment]  # a plain mark, no parameter


def anew(module: nn.Module, reset: Callable[[], None]) -> None:
    """Initialise a module, except for the tensors that were loaded from a file."""
    tensors = [*module.parameters(), *module.buffers()]
    loaded = [(t, t.clone()) for t in tensors if getattr(t, "_is_hf_initialized", False)]
    if len(loaded) == len(tensors):
        return
    with torch_draws():
        reset()
    for tensor, value in loaded:
        tensor.copy_(value)


@contextmanager
def torch_draws() -> Iterator[None]:
    """torch's own functions of ``nn.init`` inside, those that were there afterwards."""
    there = {name: getattr(nn.init, name) for name in DRAWS}
    try:
        for name, draw in DRAWS.items():
            setattr(nn.init, name, draw)
        yield
    finally:
        for name, draw in there.items():
            setattr(nn.init, name, draw)
