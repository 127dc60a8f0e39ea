"""Mixers of a model that mix in another way for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..mixers import Mixer
from ..mixers.entries import Entry

Mix = Callable[..., Tensor]
Method = tuple[nn.Module, str, Callable[..., Any]]


def mixers_of(model: nn.Module) -> list[Mixer]:
    """Return every mixer in a model, the model itself included."""
    return [each for each in model.modules() if isinstance(each, Mixer)]


@contextlib.contextmanager
def replace_methods(methods: list[Method]) -> Iterator[None]:
    """Replace methods of modules, given as (module, name, function), within this block."""
    before = [(module, name, vars(module).get(name)) for module, name, _ in methods]
    try:
        for module, name, function in methods:
            setattr(module, name, function)
        yield
    finally:
        for module, name, own in before:
            vars(module).pop(name, None)
            if own is not None:
                setattr(module, name, own)


def forward_of(mixer: Mixer, mix: Mix) -> Callable[..., object]:
    """Return a ``forward`` that mixes by ``mix(mixer, x, positions=..., key_mask=...)``; streams stay as they are."""
    whole = type(mixer).forward

    def forward(
        x: Tensor, context: Tensor | None = None, *, entry: Entry[object] | None = None, **given: Any
    ) -> object:
        if entry is not None:
            return whole(mixer, x, entry=entry, **given)
        known = {"positions", "key_mask"}
        extra = sorted(name for name, a in given.items() if name not in known and a is not None and a != 0)
        if context is not None or extra:
            mixer.refuse(f"mixes on many ranks without {', '.join(extra) or 'a context'}; leave it out")
        return mix(mixer, x, positions=given.get("positions"), key_mask=given.get("key_mask"))

    return forward
