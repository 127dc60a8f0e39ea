"""Pure functions on tensors: the numerically safe form of each mixer, and the choice of kernel. No parameters."""

from ..kernels.backend import use_backend
from .aft import aft_full, aft_local, aft_simple
from .aft_conv import aft_conv
from .aft_forget import aft_forget
from .aft_pairs import aft_pairs
from .attention import attention
from .axial import axial
from .compressive import compressive
from .external import external, simplified_attention
from .fourier import fourier
from .gmlp import gmlp
from .hydra import hydra, multihead_linear
from .image_local import image_local
from .lambda_layer import lambda_layer
from .lightconv import lightconv
from .linear import linear_attention
from .linformer import linformer
from .memory_compressed import memory_compressed
from .mlp_mixer import mlp_mixer
from .nystrom import nystrom
from .patterns import fixed, local, strided
from .patterns_global import bigbird, longformer
from .pct_attention import pct_attention
from .performer import performer
from .pooling import pooling
from .reformer import reformer
from .rfa import rfa
from .routing import routing
from .set import induced_set
from .sinkhorn import sinkhorn
from .spatial_reduction import spatial_reduction
from .synthesizer import (
    synthesize,
    synthesizer_dense,
    synthesizer_factorized_dense,
    synthesizer_factorized_random,
    synthesizer_mixture,
    synthesizer_random,
)
from .transformer_xl import transformer_xl

__all__ = [
    "aft_conv",
    "aft_forget",
    "aft_full",
    "aft_local",
    "aft_pairs",
    "aft_simple",
    "attention",
    "axial",
    "bigbird",
    "compressive",
    "external",
    "fixed",
    "fourier",
    "gmlp",
    "hydra",
    "image_local",
    "induced_set",
    "lambda_layer",
    "lightconv",
    "linear_attention",
    "linformer",
    "local",
    "longformer",
    "memory_compressed",
    "mlp_mixer",
    "multihead_linear",
    "nystrom",
    "pct_attention",
    "performer",
    "pooling",
    "reformer",
    "rfa",
    "routing",
    "simplified_attention",
    "sinkhorn",
    "spatial_reduction",
    "strided",
    "synthesize",
    "synthesizer_dense",
    "synthesizer_factorized_dense",
    "synthesizer_factorized_random",
    "synthesizer_mixture",
    "synthesizer_random",
    "transformer_xl",
    "use_backend",
]
