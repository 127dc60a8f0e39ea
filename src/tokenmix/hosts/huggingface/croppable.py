"""Let the recurrent layers of transformers' own hybrids take tokens back, which its assisted decoding asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, LinearAttentionLayer

from ...errors import MixerError
from ...models.blocks import evaluation_mode
from .cache import OUTPUT_NAME


class Chunk(NamedTuple):
    """Hold what a module read: how many tokens, a function that reads the first n of them again, the states before."""

    reader: Any
    tokens: int
    read: Callable[[int], object]
    conv: dict[int, Tensor | None]
    recurrent: dict[int, Tensor | None]
    begun: dict[int, bool]


class CroppableLayer(LinearAttentionLayer):
    """Hold a recurrent layer's states, from which the last tokens can be taken back.

    Transformers takes back convolutions, keys and values. A decayed state cannot be divided by its decay, so the layer
    begins again with the state before the chunk, and reads the tokens that stay.
    """

    is_croppable = True
    chunks: list[Chunk]
    caller: Any = None  # the module that was called last with this layer's cache
    reader: Any = None  # that which makes the recurrent states: single tokens change them without a word

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Store a state, and note which module makes it."""
        if self.reader is None:
            self.reader = self.caller
        state: Tensor = super().update_recurrent_state(*args, **kwargs)
        return state

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens, which must have come since the last ``crop``."""
        left, recurrent = abs(int(tokens_to_remove)), self.is_recurrent_states_initialized
        chunks = [chunk for chunk in self.chunks if chunk.reader is self.reader]
        self.chunks = []
        super().crop(tokens_to_remove)
        conv = dict(self.conv_states)
        if any(recurrent.values()) and left > (have := sum(chunk.tokens for chunk in chunks)):
            raise MixerError(f"CroppableLayer: can take back the {have} tokens since the last crop, not {left}.")
        while left and any(recurrent.values()):
            chunk = chunks.pop()
            self._return_to(chunk)
            if chunk.tokens > left:
                chunk.read(chunk.tokens - left)
            left -= min(left, chunk.tokens)
        self.conv_states.update(conv)

    def _return_to(self, chunk: Chunk) -> None:
        """Begin again before a chunk."""
        self.conv_states.update(chunk.conv)
        self.has_previous_state.update(chunk.begun)
        for i, before in chunk.recurrent.items():
            if before is not None and (held := self.recurrent_states[i]) is not None:
                held.copy_(before)


@cache
def _croppable(kind: type) -> type:
    return type(f"Croppable{kind.__name__}", (CroppableLayer, kind), {})


@contextmanager
def croppable_states(model: Any) -> Iterator[None]:
    """Let a hybrid of transformers be generated from with guesses: a smaller model's, or those of prompt look-up.

    Inside the block, caches that the model fills take tokens back, so that ``model.generate`` accepts
    ``assistant_model`` and ``prompt_lookup_num_tokens`` for Qwen3-Next, Kimi Linear, Falcon-H1 and others, whose
    recurrent states it refuses to crop. The tokens of a chunk that were guessed right are read by the recurrent layers
    a second time; nothing else is. Needs transformers 5.24.

    Raises:
        MixerError: for an older transformers, and for a model that does not continue a chunk from its cache, such as
            Jamba, which begins again at each chunk.
    """
    if not hasattr(LinearAttentionLayer, "activate_past_recording"):
        raise MixerError("croppable_states: needs transformers 5.24 or newer, whose caches record convolutions.")
    _check_chunks(model)
    handles = [
        module.register_forward_pre_hook(_note_chunk, with_kwargs=True)
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
    ]
    model._is_stateful, stateful = False, getattr(model, "_is_stateful", False)  # by which generate() refuses
    try:
        yield
    finally:
        model._is_stateful = stateful
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _check_chunks(model: Any) -> None:
    """Refuse a model for which reading eight tokens differs from reading four and four: guesses would change texts."""
    ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    with evaluation_mode(model):
        whole = model(ids).logits[:, 4:].float()
        first = model(ids[:, :4], use_cache=True)
        rest = model(ids[:, 4:], **{OUTPUT_NAME: getattr(first, OUTPUT_NAME)}).logits.float()
    apart, size = (float(a.abs().max()) for a in (rest - whole, whole))
    if not apart <= size * (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1):
        found = f"reads a chunk after a cache otherwise than at once: logits of {size:.1e} differ by {apart:.1e}"
        raise MixerError(f"croppable_states: {type(model).__name__} {found}; guesses would change its texts.")


def _note_chunk(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what a module is about to read into a recurrent layer of a cache."""
    caches = [each for each in (*args, *kwargs.values()) if isinstance(each, Cache)]
    layers = getattr(caches[0], "layers", []) if caches else []
    layer: Any = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    kind: Any = type(layer)
    if kind in (LinearAttentionLayer, getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)):
        layer.__class__, layer.chunks = _croppable(kind), []
    if not isinstance(layer, CroppableLayer):
        return
    layer.caller = module
    if not layer.record_past or layer.reader not in (None, module):
        return
    tokens = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)).shape[1]

    def read(n: int) -> object:
        def first(a: Any) -> Any:
            return a[:, :n] if isinstance(a, Tensor) and a.ndim > 1 and a.shape[1] == tokens else a

        with torch.no_grad():
            return module.forward(*map(first, args), **{name: first(a) for name, a in kwargs.items()})

    before = {i: None if a is None else a.clone() for i, a in layer.recurrent_states.items()}
    layer.chunks.append(Chunk(module, tokens, read, dict(layer.conv_states), before, dict(layer.has_previous_state)))
