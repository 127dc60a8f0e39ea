"""Hold a mixer's state in the cache of a transformers model that has other layers too. Needs transformers."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer

from ...errors import MixerError
from ..huggingface.cache import TokenMixStateLayer


def state_layer(cache: Cache, index: int, where: str) -> TokenMixStateLayer:
    """Return the cache layer that holds the state of mixer number ``index``.

    An empty layer of transformers is replaced by one that holds such a state.

    Raises:
        MixerError: for a static cache, and for one that holds another model's keys and values there.
    """
    layers, layer = _layers(_own_cache(cache), index)
    if isinstance(layer, TokenMixStateLayer):
        return layer
    if isinstance(layer, StaticLayer):
        only = "a static cache holds keys and values only"
        raise MixerError(f"{where}: {only}; leave cache_implementation at its default.")
    if layer.get_seq_length():
        held = f"this cache holds keys and values of another model's layer {index}"
        raise MixerError(f"{where}: {held}; use a new cache.")
    layers[index] = TokenMixStateLayer()
    return layers[index]


def context_layer(cache: Cache, index: int) -> TokenMixStateLayer | None:
    """Return the cache layer for the context that mixer number ``index`` reads; None if the cache has none."""
    if not isinstance(cache, EncoderDecoderCache):
        return None
    layers, layer = _layers(cache.cross_attention_cache, index)
    if not isinstance(layer, TokenMixStateLayer):
        if isinstance(layer, StaticLayer) or layer.get_seq_length():
            return None
        layers[index] = TokenMixStateLayer()
    return layers[index]


def tokens_before(cache: Cache, index: int, new: int) -> int:
    """Return how many tokens preceded the ``new`` ones, which self-attention ``index`` has cached already."""
    return max(int(_own_cache(cache).get_seq_length(index)) - new, 0)


def _own_cache(cache: Cache) -> Cache:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _layers(cache: Cache, index: int) -> tuple[list[Any], Any]:
    """Extend a cache's layers up to ``index``; return them and that layer."""
    layers = cache.layers
    while len(layers) <= index:
        layers.append(
            cache.layer_class_to_replicate() if cache.layer_class_to_replicate is not None else TokenMixStateLayer()
        )
    return layers, layers[index]
