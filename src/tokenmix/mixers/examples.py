"""Mixers with example values for the options that have no default."""

from __future__ import annotations

from ..errors import MixerError
from .base import Mixer
from .registration import build_mixer
from .table import MIXERS


def example_mixer(name: str, dim: int, *, T: int, causal: bool | None = None) -> Mixer:
    """Build a mixer with its defaults, and example values for the options it insists on; causal where it can be."""
    causal = MIXERS[name].facts.causal if causal is None else causal
    return build_mixer(name, dim, causal=causal, **MIXERS[name].example_options(T))


def state_growth(name: str) -> str:
    """Return how the streaming state grows by its cost formula: "constant", "grows with T", or why neither is known."""
    if not MIXERS[name].facts.streaming:
        return "none, it does not stream"
    try:
        few, many = (
            example_mixer(name, 16, T=64).mixing_cost(T).state for T in (32, 64)
        )  # both shorter than any window grows, or beyond
    except MixerError:
        return "not declared"
    return "constant" if few == many else "grows with T"
