"""Hold a mixer's streaming state as a layer of transformers' caches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...errors import MixerError
from ...mixers import State, reorder
from ...types import Options
from ..cache_names import given_cache
from .masks import Place


class Step(NamedTuple):
    """Hold a chunk that may be removed: the value before it, its tokens, and a function: n to the value after n."""

    before: Any
    tokens: int
    after: Callable[[int], Any]


def taken_back(steps: list[Step], tokens: int) -> Any:
    """Remove the last ``tokens`` > 0 tokens from the chunks; return the value before them."""
    while tokens:
        step = steps.pop()
        held = step.before if step.tokens <= tokens else step.after(step.tokens - tokens)
        tokens -= min(step.tokens, tokens)
    return held


class TokenMixStateLayer(CacheLayerMixin):
    """Hold one layer's state in a ``DynamicCache(config=...)``; its size is constant for most mixers.

    ``place``, kept by the first layer, says how far each row has come. Between
    ``activate_past_recording`` and ``crop`` chunks are recorded, so that their last tokens can be taken back, as
    assisted decoding does with wrong guesses.
    """

    _layer_type: str | None = "tokenmix_state"  # the name in config.layer_types by which transformers finds the class
    is_compileable = is_croppable = is_sliding = supports_early_init = False

    def __init__(self, **kwargs: object):
        super().__init__()
        self.state: State = None
        self.place: Place | None = None
        self.seen, self.record_past, self.is_croppable = 0, False, False
        self.steps: list[Step] = []
        self.places: list[Step] = []

    def store(self, state: State, tokens: int, after: Callable[[int], State] | None = None) -> None:
        """Store the state after ``tokens`` more tokens; ``after(n)`` gives the state after only the first n of them."""
        if self.record_past and after is not None:
            self.steps.append(Step(self.state, tokens, after))
        self.state, self.seen, self.is_initialized = state, self.seen + tokens, True

    def advance(self, places: Place) -> None:
        """Store the position of each row after a chunk; ``places`` (B, L) has it for each token."""
        if self.record_past:
            self.places.append(Step(self.place, places.last.shape[1], lambda n: places.at_token(n - 1)))
        self.place = places.at_token(-1)

    def activate_past_recording(self) -> None:
        """Record chunks from now on."""
        self.record_past = self.is_croppable = True

    @property
    def batch_size(self) -> int:
        """Return the rows of the state; transformers tests whether this attribute exists."""
        if self.state is None:
            raise AttributeError("an empty state has no rows yet")
        return pytree.tree_leaves(self.state)[0].shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the mixer makes its own state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> NoReturn:
        """Refuse keys and values, which this layer does not hold."""
        holds = "holds a mixer's state, not keys and values"
        raise MixerError(f"TokenMixStateLayer: {holds}; use a cache of tokenmix with a tokenmix model only.")

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (length of keys, offset) as transformers' masks count them."""
        return self.seen + (query_length.shape[0] if isinstance(query_length, Tensor) else query_length), 0

    def _pick(self, index: Tensor) -> None:
        if self.state is None:
            return
        index = torch.arange(self.batch_size, device=index.device)[index]  # also accepts a mask of rows
        device = pytree.tree_leaves(self.state)[0].device
        self.state = reorder(self.state, index.to(device))
        self.place = None if self.place is None else self.place.of_rows(index)
        self.steps, self.places = [], []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Move row beam_idx[i] to row i, for beam search."""
        self._pick(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at these indices."""
        self._pick(torch.as_tensor(indices, device=None if isinstance(indices, Tensor) else "cpu"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        if self.state is not None:
            self._pick(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens.

        They must have come since ``activate_past_recording`` and the last ``crop``. A running sum cannot be rolled
        back: whole chunks are dropped, and the remaining tokens of a partly dropped chunk are read again.
        """
        left = abs(int(tokens_to_remove))  # transformers before 5.24 may give a tensor
        if left > sum(step.tokens for step in self.steps):
            how = "call cache.activate_past_recording() before they come, or decode without an assistant model"
            raise MixerError(f"TokenMixStateLayer: a mixer's state cannot take back {left} tokens; {how}.")
        if left:
            self.state, self.seen = taken_back(self.steps, left), self.seen - left
            self.place = taken_back(self.places, left) if self.places else self.place
        self.steps, self.places = [], []

    def reset(self) -> None:
        """Return to the state before the first token."""
        self.state, self.place, self.seen, self.is_initialized = None, None, 0, False
        self.steps, self.places = [], []

    def offload(self) -> None:
        """Do nothing: the state is small."""

    def prefetch(self) -> None:
        """Do nothing: nothing was offloaded."""


def _refuse_static(*args: object, **kwargs: object) -> NoReturn:
    """Refuse a static layer, which would hold keys and values of a fixed length."""
    static = "static caches are not supported: they hold keys and values, and a mixer's state needs none"
    raise MixerError(f"tokenmix: {static}; leave cache_implementation at its default.")


getattr(cache_utils, "STATIC_LAYER_TYPE_MAPPING", {})[TokenMixStateLayer._layer_type] = _refuse_static


OUTPUT_NAME = "cache" if "cache" in BaseModelOutputWithPast.__annotations__ else "past_key_values"


def input_cache(who: str, cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return the cache given by either of its names; warn of the old one where transformers does."""
    if past_key_values is not None and OUTPUT_NAME == "cache" and not torch.compiler.is_compiling():
        old = "`past_key_values` is deprecated since transformers 5.24"
        warnings.warn(f"{who}: {old}; pass it as cache.", FutureWarning, stacklevel=3)
    return given_cache(who, cache=cache, past_key_values=past_key_values)


def name_cache_output(cache: Cache | None) -> Options:
    """Return a cache under its name in the outputs of the installed transformers."""
    return {OUTPUT_NAME: cache}


def state_layers(cache: Cache, layers: int, who: str) -> list[TokenMixStateLayer]:
    """Return the layers of a cache, which must be made for this model."""
    found = list(getattr(cache, "layers", []))
    if len(found) != layers or not all(isinstance(layer, TokenMixStateLayer) for layer in found):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in found})) or "no layers"
        wanted = f"DynamicCache(config=model.config) with {layers} layers"
        raise MixerError(f"{who}: cache must be {wanted}, got {type(cache).__name__} with {kinds}.")
    return found
