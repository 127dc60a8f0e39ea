"""Token mixers for PyTorch: layers that can take the place of attention."""

from .system.collection import collection_paused

with collection_paused():  # which saves a fourth of this import
    from . import contrib, functional
    from .contrib import Performer, SynthesizerMixture
    from .errors import MixerError
    from .functional import use_backend
    from .kernels.fast_linear import fast_linear
    from .mixers import (
        MIXERS,
        RFA,
        AFTConv,
        AFTForget,
        AFTFull,
        AFTLocal,
        AFTPairs,
        AFTReach,
        AFTSimple,
        Attention,
        Capabilities,
        External,
        ExternalMultihead,
        GatedDelta,
        Hydra,
        LinearAttention,
        Local,
        Mixer,
        MultiheadLinear,
        Segment,
        SynthesizerDense,
        SynthesizerFactorizedDense,
        SynthesizerFactorizedRandom,
        SynthesizerRandom,
        aux_losses,
        build_mixer,
        merge,
        register_mixer,
        reorder,
        state_bytes,
    )
    from .parallel import long_backward
    from .system.malloc import keep_memory
    from .system.moved import MOVED, answer_old_names
    from .system.version import __version__
    from .system.when_imported import import_after

answer_old_names()
# so that transformers' Auto classes open models whose attention was replaced
import_after("transformers.models.auto.configuration_auto", "tokenmix.hosts.surgery.register_config")
import_after("transformers.models.auto.modeling_auto", "tokenmix.hosts.surgery.auto_classes")

__all__ = [
    "AFTConv",
    "AFTForget",
    "AFTFull",
    "AFTLocal",
    "AFTPairs",
    "AFTReach",
    "AFTSimple",
    "Attention",
    "Capabilities",
    "External",
    "ExternalMultihead",
    "GatedDelta",
    "Hydra",
    "LinearAttention",
    "Local",
    "MIXERS",
    "Mixer",
    "MixerError",
    "MultiheadLinear",
    "Performer",
    "RFA",
    "Segment",
    "SynthesizerDense",
    "SynthesizerFactorizedDense",
    "SynthesizerFactorizedRandom",
    "SynthesizerMixture",
    "SynthesizerRandom",
    "__version__",
    "aux_losses",
    "build_mixer",
    "contrib",
    "fast_linear",
    "functional",
    "keep_memory",
    "long_backward",
    "merge",
    "register_mixer",
    "reorder",
    "state_bytes",
    "use_backend",
]


def __getattr__(name: str) -> object:
    if name in MOVED:
        raise ModuleNotFoundError(f"tokenmix.{name} is now tokenmix.lab.{name}.")  # `from` shows no AttributeError
    raise AttributeError(f"module 'tokenmix' has no attribute {name!r}.")
