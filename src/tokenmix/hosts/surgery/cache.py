"""Hold a mixer's state in the cache of a transformers model that has other layers too. Needs transformers."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.cache_utils import Cache, EncoderDecoderCache, LinearAttentionLayer, StaticLayer

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
    layers[index] = SharedLayer(layer) if isinstance(layer, LinearAttentionLayer) else TokenMixStateLayer()
    return layers[index]


class SharedLayer(LinearAttentionLayer, TokenMixStateLayer):  # type: ignore[override]  # of is_compileable, below
    """Hold a mixer's state beside that of a Mamba which runs in parallel, as in Falcon-H1.

    Args:
        before: the layer of transformers with the state of that Mamba.
    """

    is_croppable = is_compileable = False
    _layer_type = None  # transformers finds no class of its own by this one's name

    def __init__(self, before: LinearAttentionLayer):
        TokenMixStateLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=before.number_of_states)
        self.__dict__ |= {name: value for name, value in vars(before).items() if name in vars(self)}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the state of Mamba; a mixer makes its own."""
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        """Return to the state before the first token."""
        LinearAttentionLayer.reset(self)
        TokenMixStateLayer.reset(self)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Move row beam_idx[i] to row i, for beam search."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        TokenMixStateLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refuse: the state of Mamba cannot be taken back."""
        raise MixerError("SharedLayer: the states of Mamba and a mixer cannot take tokens back; decode without it.")

    def offload(self) -> None:
        """Do nothing: the states are small."""

    def prefetch(self) -> None:
        """Do nothing: nothing was offloaded."""


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
