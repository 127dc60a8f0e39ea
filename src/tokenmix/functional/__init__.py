"""Pure functions on tensors: the numerically safe form of each mixer, and the choice of kernel. No parameters."""

from ..kernels.backend import use_backend
from .aft import aft_full, aft_local, aft_simple
from .aft_conv import aft_conv
from .aft_forget import aft_forget
from .aft_pairs import aft_pairs
from .attention import attention
from .external import external
from .gated_delta import gated_delta
from .hydra import hydra, multihead_linear
from .linear import linear_attention
from .local import local
from .performer import performer
from .recurrence import recurrence
from .rfa import rfa
from .synthesizer import (
    synthesize,
    synthesizer_dense,
    synthesizer_factorized_dense,
    synthesizer_factorized_random,
    synthesizer_mixture,
    synthesizer_random,
)

__all__ = [
    "aft_conv",
    "aft_forget",
    "aft_full",
    "aft_local",
    "aft_pairs",
    "aft_simple",
    "attention",
    "external",
    "gated_delta",
    "hydra",
    "linear_attention",
    "local",
    "multihead_linear",
    "performer",
    "recurrence",
    "rfa",
    "synthesize",
    "synthesizer_dense",
    "synthesizer_factorized_dense",
    "synthesizer_factorized_random",
    "synthesizer_mixture",
    "synthesizer_random",
    "use_backend",
]
