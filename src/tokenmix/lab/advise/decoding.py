"""The cost of generating one more token after a context: our causal models use their state, transformers its cache."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import MixerError
from ...hosts.cache_names import find_cache_name, returned_cache
from ...models import LM
from ..bench import decoding
from ..bench.timing import quartile
from .inputs import Inputs

STEPS = 12


@dataclass(frozen=True)
class Decoded:
    """Milliseconds for one more token, and the bytes kept between two tokens, for the whole batch."""

    ms_per_token: float
    state_bytes: int


@torch.no_grad()
def decode(model: nn.Module, inputs: Inputs, length: int, batch: int) -> Decoded | None:
    """Measure after a context so long that the last measured token is number ``length``; None if the model does not
    generate, or one of its mixers cannot continue from a cache.
    """
    context = length - STEPS - 1
    if inputs.patch is not None or context < 1:
        return None
    if isinstance(model, LM):
        found = decoding(model, context, tokens=STEPS)
        return Decoded(found.ms_per_token, found.state_bytes)
    known, name = inspect.signature(model.forward).parameters, find_cache_name(model)
    if name is None or not {"use_cache", "input_ids"} <= known.keys() or not _decoder(model.config):
        return None
    ids = inputs.make(length, batch)[1]["input_ids"]
    times = []
    try:
        cache = returned_cache(model(input_ids=ids[:, :context], use_cache=True))
        if cache is None:
            return None
        for i in range(context, length):
            start = _current_time(ids)
            model(input_ids=ids[:, i : i + 1], use_cache=True, **{name: cache})
            times.append(_current_time(ids) - start)
    except MixerError:
        return None
    return Decoded(quartile(sorted(times[1:])) * 1e3, cache_bytes(cache))


def _decoder(config: Any) -> bool:
    """Return whether a model of transformers is a causal decoder.

    The configs of GPT-2 and Llama do not state it, because they always are; that of BERT has ``is_decoder``.
    """
    return not config.is_encoder_decoder and (config.model_type not in ENCODERS or config.is_decoder)


ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
"""Model types that are decoders only where their config says so."""


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all tensors in the layers of a cache: keys and values, or a mixer's state."""
    leaves = pytree.tree_leaves(
        [[getattr(layer, name, None) for name in ("keys", "values", "state")] for layer in cache.layers]
    )
    return sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor))


def _current_time(like: Tensor) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()
