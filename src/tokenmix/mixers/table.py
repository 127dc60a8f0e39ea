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
from .axial import Axial
from .base import Mixer
from .compressive import Compressive
from .external import External, ExternalMultihead, SimplifiedAttention
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
from .patterns import Fixed, Strided
from .patterns_global import ETC, BigBird, Longformer
from .pct_attention import PCTAttention
from .performer import Performer
from .pooling import Pooling
from .reformer import Reformer
from .rfa import RFA
from .routing import Routing
from .set import InducedSet
from .sinkhorn import Sinkhorn
from .spatial_reduction import SpatialReduction
from .synthesizer import SynthesizerDense, SynthesizerFactorizedDense, SynthesizerFactorizedRandom, SynthesizerRandom
from .synthesizer_mixture import SynthesizerMixture
from .transformer_xl import TransformerXL

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
    # points
    "pct_attention": PCTAttention,
}
"""Every mixer by name, family by family."""

CORE = tuple(name for name, cls in MIXERS.items() if cls.about.tier == "core")


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
