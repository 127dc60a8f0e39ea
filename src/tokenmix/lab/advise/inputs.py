"""What a model is called with at a length: tokens for language models, images of a size for vision models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import isqrt, lcm, prod
from typing import Any

import torch
from torch import nn

from ...errors import MixerError
from ...hosts.surgery import find_attention
from ...models import LM, ViT
from ...system.calls import split_arguments
from ..bench.decode import device_of

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a call."""
WRITTEN = 64
"""Tokens of text that a speech model reads beside its recording."""
FACTORY = "give a factory that returns (model, inputs)"


def _as_it_is(model: nn.Module, length: int) -> None:
    """Change nothing: the model takes inputs of any length."""


@dataclass(frozen=True)
class Inputs:
    """How a model is called.

    Args:
        make: length and batch -> the arguments.
        patch: height and width of a patch of a vision model, whose lengths are the sides of square images; None:
            lengths are tokens.
        prefix: tokens before the patches.
        limit: the longest length the model takes; None: none is known.
        only: the only length the model takes; None: it takes several.
        known_to_export: whether export knows by itself how to call the model, with one input of any length.
        fit: changes a model to another image size, in place.
    """

    make: Callable[[int, int], Given]
    patch: tuple[int, int] | None = None
    prefix: int = 0
    limit: int | None = None
    fit: Callable[[Any, int], None] = _as_it_is
    only: int | None = None
    known_to_export: bool = False

    @property
    def unit(self) -> str:
        """What a length counts."""
        return "pixels" if self.patch else "tokens"

    def tokens(self, length: int) -> int:
        """Return the tokens of one row."""
        return length if self.patch is None else prod(length // side for side in self.patch) + self.prefix

    def length(self, tokens: float) -> int:
        """Return the shortest length with at least this many tokens."""
        if self.patch is None:
            return round(tokens)
        whole, least = lcm(*self.patch), isqrt(max(round((tokens - self.prefix) * prod(self.patch)), 1))
        return next(n for n in count(max(least // whole, 1) * whole, whole) if self.tokens(n) >= tokens)

    def refusal(self, length: int) -> str | None:
        """Return why the model cannot take a length; None where it can."""
        if self.only is not None and length != self.only:
            return f"the model takes {self.only:,} {self.unit} and no other length"
        if self.limit is not None and length > self.limit:
            return f"the model takes {self.limit:,} {self.unit} at most"
        if self.patch is not None and any(length % side for side in self.patch):
            return f"the patches of {' x '.join(map(str, dict.fromkeys(self.patch)))} pixels do not divide it"
        return None

    def usual_lengths(self, size: int | None = None) -> list[int]:
        """Return the lengths to measure where none are given."""
        if self.only is not None:
            return [self.only]
        if self.patch is not None:
            whole = lcm(*self.patch)
            first = max((size or 224) // whole, 1) * whole
            return [first, 2 * first]
        found = [n for n in (256, 1024, 4096) if n <= (self.limit or n)]
        return found if self.limit is None or self.limit >= 4096 or self.limit in found else [*found, self.limit]


def inputs_of(model: nn.Module, where: str) -> Inputs:
    """Return how a model of a known host is called.

    Raises:
        MixerError: the model belongs to no known host; a factory can supply inputs for it.
    """
    if isinstance(model, LM):
        return Inputs(_numbers(model.config.vocab, model), limit=model.max_len, known_to_export=True)
    if isinstance(model, ViT):
        config = model.config
        return Inputs(
            _images(config.channels, model),
            (config.patch, config.patch),
            config.prefix,
            fit=lambda m, n: None if m.config.image_size == (n, n) else m.resize(n),
        )
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        return _transformers(model, where)
    if hasattr(model, "patch_embed") and hasattr(model, "set_input_size"):
        return _timm(model)
    raise MixerError(
        f"advise: {where}: how to call a {type(model).__name__} is not known; let the factory return (model, inputs), "
        "where inputs(length, batch) returns what the model is called with: a tensor, a tuple or a dict."
    )


def own_inputs(make: Callable[[int, int], object], model: nn.Module, where: str) -> Inputs:
    """Wrap the inputs that a factory supplies."""

    def make_arguments(length: int, batch: int) -> Given:
        return split_arguments(make(length, batch), f"advise: {where}: inputs({length}, {batch})")

    return Inputs(make_arguments, limit=_limit(model))


def _limit(model: nn.Module) -> int | None:
    """Return the tokens the model has positions for, or None; rotary positions have no limit."""
    limits = [
        s.max_len
        for s in find_attention(model)
        if s.max_len is not None and not s.rotary and s.grid is None and not s.cross
    ]
    return min(limits, default=None)


def _numbers(vocab: int, model: nn.Module) -> Callable[[int, int], Given]:
    """Return a function that makes token numbers, the same in every call."""

    def make(length: int, batch: int) -> Given:
        tokens = torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(0))
        return (tokens.to(device_of(model)),), {}

    return make


def _images(channels: int, model: nn.Module) -> Callable[[int, int], Given]:
    def make(size: int, batch: int) -> Given:
        images = torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(0))
        weight = next(model.parameters())
        return (images.to(weight.device, weight.dtype),), {}

    return make


def _transformers(model: Any, where: str) -> Inputs:
    """Return token numbers or images, by the model's main input."""
    config, known = model.config, inspect.signature(model.forward).parameters
    if model.main_input_name == "pixel_values":
        sites = find_attention(model)
        patch = getattr(config, "patch_size", None)
        patch = (patch, patch) if isinstance(patch, int) else tuple(patch or ())
        if len(patch) != 2:
            raise MixerError(f"advise: {where}: a {type(model).__name__} has no patch_size; {FACTORY}.")
        images = _images(config.num_channels, model)
        named = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in known else {}
        return Inputs(
            lambda n, b: ((), {"pixel_values": images(n, b)[0][0], **named}),
            (patch[0], patch[1]),
            max((s.prefix for s in sites), default=0),
        )
    if model.main_input_name == "input_features" and hasattr(config, "max_source_positions"):
        return _speech(model)
    if model.main_input_name != "input_ids":
        raise MixerError(f"advise: {where}: a {type(model).__name__} takes {model.main_input_name}; {FACTORY}.")
    numbers = _numbers(config.get_text_config().vocab_size, model)
    fixed = {"use_cache": False} if "use_cache" in known else {}

    def make(length: int, batch: int) -> Given:
        ids = numbers(length, batch)[0][0]
        return (), {"input_ids": ids, **fixed, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}

    return Inputs(make, limit=_limit(model), known_to_export=not config.is_encoder_decoder)


def _speech(model: Any) -> Inputs:
    """Return a recording and the first tokens of its text: lengths are tokens of the encoder, of two frames each."""
    config = model.config
    numbers = _numbers(config.vocab_size, model)
    written = min(WRITTEN, config.max_target_positions)

    def make(length: int, batch: int) -> Given:
        draw, weight = torch.Generator().manual_seed(0), next(model.parameters())
        features = torch.randn(batch, config.num_mel_bins, 2 * length, generator=draw)
        decoded = numbers(written, batch)[0][0]
        named = {"input_features": features.to(weight.device, weight.dtype), "decoder_input_ids": decoded}
        return (), {**named, "use_cache": False}

    return Inputs(make, only=config.max_source_positions)


def _timm(model: Any) -> Inputs:
    embed = model.patch_embed

    def fit(m: Any, size: int) -> None:
        if tuple(m.patch_embed.img_size) != (size, size):
            m.set_input_size(img_size=size)

    return Inputs(
        _images(embed.proj.in_channels, model), tuple(embed.patch_size), getattr(model, "num_prefix_tokens", 0), fit=fit
    )
