"""The table of mixers by name."""

from __future__ import annotations

from typing import Any

from ..errors import MixerError
from .aft import AFTFull, AFTLocal, AFTSimple
from .aft_conv import AFTConv
from .aft_forget import AFTForget
from .aft_pairs import AFTPairs
from .aft_reach import AFTReach
from .attention import Attention
from .base import Mixer
from .external import External, ExternalMultihead
from .gated_delta import GatedDelta
from .hydra import Hydra, MultiheadLinear
from .linear import LinearAttention
from .local import Local
from .rfa import RFA
from .synthesizer import SynthesizerDense, SynthesizerFactorizedDense, SynthesizerFactorizedRandom, SynthesizerRandom

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "aft_full": AFTFull,
    "aft_local": AFTLocal,
    "aft_simple": AFTSimple,
    "aft_conv": AFTConv,
    "aft_forget": AFTForget,
    "aft_reach": AFTReach,
    "aft_pairs": AFTPairs,
    # hydra
    "hydra": Hydra,
    "multihead_linear": MultiheadLinear,
    # external
    "external": External,
    "external_multihead": ExternalMultihead,
    # synthesizer
    "synthesizer_dense": SynthesizerDense,
    "synthesizer_random": SynthesizerRandom,
    "synthesizer_factorized_dense": SynthesizerFactorizedDense,
    "synthesizer_factorized_random": SynthesizerFactorizedRandom,
    # linear
    "linear": LinearAttention,
    "rfa": RFA,
    # recurrences
    "gated_delta": GatedDelta,
    # local
    "local": Local,
}
"""Every mixer by name: those of the core, to which ``contrib`` and ``register_mixer`` add."""

CORE = tuple(MIXERS)


def is_softmax(spec: dict[str, Any]) -> bool:
    """Return whether a spec names softmax attention as other libraries have it: ``Attention`` or a subclass."""
    return issubclass(MIXERS[spec["name"]], Attention)


def register_mixer(name: str, cls: type[Mixer]) -> None:
    """Add a mixer of your own to ``MIXERS``; refuse a name that is taken."""
    if name in MIXERS:
        raise MixerError(f"register_mixer: a mixer called {name!r} exists already ({MIXERS[name].__module__}).")
    if not (isinstance(cls, type) and issubclass(cls, Mixer)):
        raise MixerError(f"register_mixer: {name!r} must be a subclass of tokenmix.Mixer, got {cls!r}.")
    MIXERS[name] = cls
