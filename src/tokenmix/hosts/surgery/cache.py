"""A mixer's streaming state inside the cache that transformers' ``generate`` passes around. Needs transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import CacheLayerMixin, EncoderDecoderCache, StaticLayer

from ...errors import MixerError


class StateLayer(CacheLayerMixin):
    """One layer of a cache: a mixer's state, batch first, and how many tokens it has seen. It cannot forget its last tokens."""

    is_compileable = is_croppable = supports_early_init = False
    is_sliding = False

    def __init__(self, **options: Any):
        super().__init__()
        self.state: Any = None
        self.length = 0

    def keep(self, state: Any, tokens: int) -> None:
        """The state after ``tokens`` more; None: of a mixer that cannot stream."""
        self.state, self.length, self.is_initialized = state, self.length + tokens, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
        """Refused: there are no keys and values to add to."""
        raise MixerError("StateLayer: holds a mixer's state, not keys and values; this cache was filled by a model with mixers in this layer.")

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Keys and offset of the mask for that many queries."""
        queries = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.length + queries, 0

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.length, self.is_initialized = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: sums cannot forget."""
        raise MixerError("StateLayer: a mixer's state cannot forget its last tokens; assisted generation needs softmax attention in every layer.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows by number."""
        self._map(lambda a: a.index_select(0, beam_idx.to(a.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times."""
        self._map(lambda a: a.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Rows by number or mask."""
        self._map(lambda a: a[indices])

    def offload(self) -> None:
        """To the CPU."""
        self._map(lambda a: a.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Back: the mixer moves it when it is used."""

    def _map(self, change: Any) -> None:
        self.state = None if self.state is None else pytree.tree_map(change, self.state)


def state_layer(cache: Any, index: int, where: str) -> StateLayer:
    """The layer of a cache that holds the state of the mixer number ``index``; an empty one takes the place of transformers' own."""
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    layers = cache.layers
    while len(layers) <= index:
        layers.append(cache.layer_class_to_replicate() if cache.layer_class_to_replicate is not None else StateLayer())
    layer = layers[index]
    if isinstance(layer, StateLayer):
        return layer
    if isinstance(layer, StaticLayer):
        raise MixerError(f"{where}: a static cache holds keys and values only; leave cache_implementation at its default.")
    if layer.get_seq_length():
        raise MixerError(f"{where}: this cache holds keys and values of another model's layer {index}; begin with a new one.")
    layers[index] = StateLayer()
    return layers[index]


def moved(state: Any, device: torch.device) -> Any:
    """The state on a device."""
    return pytree.tree_map(lambda a: a.to(device), state)
