"""A mixer's state inside the cache of a model of transformers that holds other layers too. Needs transformers."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import EncoderDecoderCache, StaticLayer

from ...errors import MixerError
from ..huggingface.cache import TokenMixStateLayer


def state_layer(cache: Any, index: int, where: str) -> TokenMixStateLayer:
    """The layer of a cache that holds the state of the mixer number ``index``; an empty one takes the place of transformers' own.

    Raises:
        MixerError: for a static cache, and for one that holds another model's keys and values there.
    """
    layers, layer = _layers(_own(cache), index)
    if isinstance(layer, TokenMixStateLayer):
        return layer
    if isinstance(layer, StaticLayer):
        raise MixerError(f"{where}: a static cache holds keys and values only; leave cache_implementation at its default.")
    if layer.get_seq_length():
        raise MixerError(f"{where}: this cache holds keys and values of another model's layer {index}; begin with a new one.")
    layers[index] = TokenMixStateLayer()
    return layers[index]


def context_layer(cache: Any, index: int) -> TokenMixStateLayer | None:
    """The same of the context that the mixer number ``index`` reads; None where the cache has no place for it."""
    if not isinstance(cache, EncoderDecoderCache):
        return None
    layers, layer = _layers(cache.cross_attention_cache, index)
    if not isinstance(layer, TokenMixStateLayer):
        if isinstance(layer, StaticLayer) or layer.get_seq_length():
            return None
        layers[index] = TokenMixStateLayer()
    return layers[index]


def tokens_before(cache: Any, index: int, new: int) -> int:
    """How many tokens preceded the ``new`` ones, which the self-attention number ``index`` has put into the cache already."""
    return max(int(_own(cache).get_seq_length(index)) - new, 0)


def _own(cache: Any) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _layers(cache: Any, index: int) -> tuple[list[Any], Any]:
    """A cache's layers, as many as it takes to reach ``index``, and that one."""
    layers = cache.layers
    while len(layers) <= index:
        layers.append(cache.layer_class_to_replicate() if cache.layer_class_to_replicate is not None else TokenMixStateLayer())
    return layers, layers[index]
