"""Initialisation under transformers, which draws module by module, marks each tensor it has drawn or loaded, and draws none twice.

Our layers begin as wholes, some of their tensors in two steps, so they are left out of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...errors import MixerError

HEADS = ("lm_head.", "score.", "qa_outputs.")
"""Where the names of a head's weights begin, which a folder of another class need not hold."""
INIT_FUNCTIONS: dict[str, Any] = {name: f for name, f in vars(nn.init).items() if name.endswith("_") and not name.startswith("_") and callable(f)}
"""torch's own functions, as they are outside of transformers' initialisation."""


def mark_self_initialized(module: nn.Module) -> None:
    """Mark what is inside of a module that begins as a whole."""
    for part in module.modules():
        if part is not module:
            part.initialized_by_owner = True  # type: ignore[assignment]  # a plain mark, no parameter


def reinitialize(module: nn.Module, reset: Callable[[], None]) -> None:
    """Initialise a module, except for the tensors that were loaded from a file."""
    tensors = [*module.parameters(), *module.buffers()]
    loaded = [(t, t.clone()) for t in tensors if getattr(t, "_is_hf_initialized", False)]
    if len(loaded) == len(tensors):
        return
    with torch_init_functions():
        reset()
    for tensor, value in loaded:
        tensor.copy_(value)


def refuse_options(who: str, given: dict[str, Any]) -> None:
    """Refuse what from_pretrained is told to do with attention and with several devices where it does not hold of mixers."""
    kind = given.get("attn_implementation") or getattr(given.get("config"), "_attn_implementation", None)  # Auto classes put it into the config
    if kind not in (None, "sdpa", "eager"):
        raise MixerError(f"{who}: attn_implementation={kind!r} is transformers' own; ours is torch's fused attention: leave it out.")
    if given.get("tp_plan") is not None:
        raise MixerError(f"{who}: has no tensor-parallel plan, as a mixer need not fall apart by heads; use device_map, or data parallel training.")


def refuse_missing_weights(model: Any, missing: Iterable[str], folder: Any) -> None:
    """Refuse what was loaded from a folder that lacks some of the model's weights, unless it is of another class and only a head is missing."""
    name, kinds = type(model).__name__, list(getattr(model.config, "architectures", None) or [])
    lost = sorted(key for key in missing if name in kinds or not key.startswith(HEADS))
    if not lost:
        return
    held = f"holds a {kinds[0]}, which lacks" if kinds and name not in kinds else "lacks"
    count = f"{len(lost)} of {len(model.state_dict())} weights of {name}, such as {lost[0]}"
    raise MixerError(f"{folder}: {held} {count}; load it as what it holds, or begin these anew with ignore_mismatched_sizes=True.")


@contextmanager
def torch_init_functions() -> Iterator[None]:
    """torch's own functions of ``nn.init`` inside, those that were there afterwards."""
    there = {name: getattr(nn.init, name) for name in INIT_FUNCTIONS}
    try:
        for name, draw in INIT_FUNCTIONS.items():
            setattr(nn.init, name, draw)
        yield
    finally:
        for name, draw in there.items():
            setattr(nn.init, name, draw)
