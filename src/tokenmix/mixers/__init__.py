"""The table of mixers, and how to build one from its name."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import MixerError
from ..system.config import nearest
from .aft import AFTFull, AFTLocal, AFTSimple
from .aft_conv import AFTConv
from .attention import Attention
from .axial import Axial
from .base import QKVO as QKVO
from .base import About as About
from .base import Capabilities as Capabilities
from .base import Mixer as Mixer
from .compressive import Compressive
from .cost import Cost as Cost
from .cost import MixingCost as MixingCost
from .external import External, ExternalMultihead, SimplifiedAttention
from .facts import Kernels as Kernels
from .facts import mixer_options as mixer_options
from .fourier import Fourier
from .gmlp import GMLP
from .hydra import Hydra, MultiheadLinear, PolyNL
from .image_local import ImageLocal
from .lambda_layer import Lambda
from .lightconv import DynamicConv, LightConv
from .linear import LinearAttention
from .linformer import Linformer
from .local import Local
from .memory_compressed import MemoryCompressed
from .mlp_mixer import MLPMixer
from .nystrom import Nystrom
from .parts.aux_losses import aux_losses as aux_losses
from .patterns import Fixed, Strided
from .patterns_global import ETC, BigBird, Longformer
from .performer import Performer
from .pooling import Pooling
from .reformer import Reformer
from .rfa import RFA
from .routing import Routing
from .set import InducedSet
from .sinkhorn import Sinkhorn
from .spatial_reduction import SpatialReduction
from .state import State as State
from .state import merge as merge
from .state import register_state as register_state
from .state import reorder as reorder
from .state import state_bytes as state_bytes
from .synthesizer import SynthesizerDense, SynthesizerFactorizedDense, SynthesizerFactorizedRandom, SynthesizerRandom
from .synthesizer_mixture import SynthesizerMixture
from .transformer_xl import TransformerXL

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "aft_full": AFTFull,
    "aft_local": AFTLocal,
    "aft_simple": AFTSimple,
    "aft_conv": AFTConv,
    # hydra
    "hydra": Hydra,
    "multihead_linear": MultiheadLinear,
    "polynl": PolyNL,
    # external
    "external": External,
    "external_multihead": ExternalMultihead,
    "simplified_attention": SimplifiedAttention,
    # synthesizer
    "synthesizer_dense": SynthesizerDense,
    "synthesizer_random": SynthesizerRandom,
    "synthesizer_factorized_dense": SynthesizerFactorizedDense,
    "synthesizer_factorized_random": SynthesizerFactorizedRandom,
    "synthesizer_mixture": SynthesizerMixture,
    # linear
    "linear": LinearAttention,
    "performer": Performer,
    "rfa": RFA,
    # local and other patterns
    "local": Local,
    "strided": Strided,
    "fixed": Fixed,
    "longformer": Longformer,
    "etc": ETC,
    "bigbird": BigBird,
    # low rank
    "linformer": Linformer,
    "nystrom": Nystrom,
    "memory_compressed": MemoryCompressed,
    "spatial_reduction": SpatialReduction,
    "set": InducedSet,
    # gated, convolutional and MLP
    "lightconv": LightConv,
    "dynamicconv": DynamicConv,
    "lambda": Lambda,
    "mlp_mixer": MLPMixer,
    "gmlp": GMLP,
    "pooling": Pooling,
    "fourier": Fourier,
    # content-sorted
    "reformer": Reformer,
    "routing": Routing,
    "sinkhorn": Sinkhorn,
    # memory
    "transformer_xl": TransformerXL,
    "compressive": Compressive,
    # images
    "axial": Axial,
    "image_local": ImageLocal,
}
"""Every mixer by name, family by family."""

CORE = tuple(name for name, cls in MIXERS.items() if cls.about.tier == "core")


def build_mixer(name: str, dim: int, **options: Any) -> Mixer:
    """Build the mixer called ``name``.

    A spec such as ``{"name": "aft_local", "window": 32}`` is built with ``build_mixer(dim=dim, **spec)``.

    Args:
        name: a key of ``MIXERS``.
        dim: number of features D.
        options: the keyword-only options of the mixer's class; those without a default are required.

    Raises:
        MixerError: if the name or an option is unknown, if a required option is missing, or if a value is not
            supported.
    """
    if not isinstance(name, str) or name not in MIXERS:
        raise MixerError(f"build_mixer: no mixer is called {name!r}; {nearest(name, MIXERS)}.")
    known = mixer_options(MIXERS[name])
    for option in options:
        if option not in known:
            raise MixerError(f"build_mixer: {name} has no option {option!r}; {nearest(option, known)}.")
    for option, default in known.items():
        if default is inspect.Parameter.empty and option not in options:
            raise MixerError(f"build_mixer: {name} needs the option {option!r}; its options are {', '.join(known)}.")
    return MIXERS[name](dim, **options)


def is_softmax(spec: dict[str, Any]) -> bool:
    """Return whether a mixer spec means softmax attention: the class ``Attention`` or a subclass of it."""
    return issubclass(MIXERS[spec["name"]], Attention)


def register_mixer(name: str, cls: type[Mixer]) -> None:
    """Add a mixer class to ``MIXERS`` under ``name``.

    Raises:
        MixerError: if the name is taken or ``cls`` is not a subclass of ``Mixer``.
    """
    if name in MIXERS:
        raise MixerError(f"register_mixer: a mixer called {name!r} exists already ({MIXERS[name].__module__}).")
    if not (isinstance(cls, type) and issubclass(cls, Mixer)):
        raise MixerError(f"register_mixer: {name!r} must be a subclass of tokenmix.Mixer, got {cls!r}.")
    MIXERS[name] = cls


def example_mixer(name: str, dim: int, *, T: int, causal: bool | None = None) -> Mixer:
    """Build a mixer with its defaults, and with example values for its required options.

    Args:
        T: the longest sequence in tokens.
        causal: None selects the causal form where the mixer has one.
    """
    causal = MIXERS[name].supports_causal if causal is None else causal
    return build_mixer(name, dim, causal=causal, **MIXERS[name].example_options(T))


def state_growth(name: str) -> str:
    """Describe how the streaming state of a mixer grows with T, according to its cost formula.

    Returns:
        "constant", "grows with T", "not declared", or "none, it does not stream".
    """
    if not MIXERS[name].supports_streaming:
        return "none, it does not stream"
    try:
        few, many = (example_mixer(name, 16, T=64).mixing_cost(T).state for T in (32, 64))  # if both lengths cost the same, the state is a ring or a sum
    except MixerError:
        return "not declared"
    return "constant" if few == many else "grows with T"
