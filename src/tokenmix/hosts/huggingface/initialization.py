"""Initialise our layers under transformers.

transformers initialises module by module, marks each tensor it has drawn or loaded, and draws none twice. Our layers
initialise themselves as a unit, some of their tensors in two steps, so transformers skips their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from ...errors import MixerError
from ...types import Options

HEADS = ("lm_head.", "score.", "qa_outputs.")
"""Prefixes of the weights of a head, which a folder of another class may lack."""
INIT_FUNCTIONS: dict[str, Callable[..., object]] = {
    name: f for name, f in vars(nn.init).items() if name.endswith("_") and not name.startswith("_") and callable(f)
}
"""torch's own functions, as they are outside transformers' initialisation."""


def mark_self_initialized(module: nn.Module) -> None:
    """Mark the parts of a module that initialises itself as a unit, so that transformers skips them."""
    for part in module.modules():
        if part is not module:
            part.initialized_by_owner = True  # type: ignore[assignment]  # a plain flag, not a parameter


def reinitialize(module: nn.Module, reset: Callable[[], None]) -> None:
    """Initialise a module again, except for the tensors that were loaded from a file."""
    tensors = [*module.parameters(), *module.buffers()]
    loaded = [(t, t.clone()) for t in tensors if getattr(t, "_is_hf_initialized", False)]
    if len(loaded) == len(tensors):
        return
    with torch_init_functions():
        reset()
    for tensor, value in loaded:
        tensor.copy_(value)


def refuse_options(who: str, given: Options) -> None:
    """Refuse arguments of from_pretrained about attention and several devices that do not apply to mixers."""
    # Auto classes put it into the config
    kind = given.get("attn_implementation") or getattr(given.get("config"), "_attn_implementation", None)
    if kind not in (None, "sdpa", "eager"):
        own = f"attn_implementation={kind!r} is transformers' own"
        raise MixerError(f"{who}: {own}; ours is torch's fused attention: leave it out.")
    if given.get("tp_plan") is not None:
        no_plan = "has no tensor-parallel plan, because mixers need not split by heads"
        raise MixerError(f"{who}: {no_plan}; use device_map, or data parallel training.")


def refuse_missing_weights(model: PreTrainedModel, missing: Iterable[str], folder: object) -> None:
    """Refuse a folder that lacks weights of the model, unless it is of another class and only a head is missing."""
    name, kinds = type(model).__name__, list(getattr(model.config, "architectures", None) or [])
    lost = sorted(key for key in missing if name in kinds or not key.startswith(HEADS))
    if not lost:
        return
    held = f"holds a {kinds[0]}, which lacks" if kinds and name not in kinds else "lacks"
    count = f"{len(lost)} of {len(model.state_dict())} weights of {name}, such as {lost[0]}"
    hint = "load it as what it holds, or initialise these with ignore_mismatched_sizes=True"
    raise MixerError(f"{folder}: {held} {count}; {hint}.")


@contextmanager
def torch_init_functions() -> Iterator[None]:
    """Use torch's own functions of ``nn.init`` inside the context, and restore the others afterwards."""
    there = {name: getattr(nn.init, name) for name in INIT_FUNCTIONS}
    try:
        for name, draw in INIT_FUNCTIONS.items():
            setattr(nn.init, name, draw)
        yield
    finally:
        for name, draw in there.items():
            setattr(nn.init, name, draw)
