"""Pure functions on tensors: the numerically safe form of each mixer, and the choice of kernel. No parameters."""

from ._backend import use_backend as use_backend
from .aft import aft_full as aft_full
from .aft import aft_local as aft_local
from .aft import aft_simple as aft_simple
from .aft_conv import aft_conv as aft_conv
from .attention import attention as attention
from .external import external as external
from .external import simplified_attention as simplified_attention
from .hydra import hydra as hydra
from .hydra import multihead_linear as multihead_linear
from .linear import linear_attention as linear_attention
from .performer import performer as performer
from .rfa import rfa as rfa
from .synthesizer import synthesize as synthesize
from .synthesizer import synthesizer_dense as synthesizer_dense
from .synthesizer import synthesizer_factorized_dense as synthesizer_factorized_dense
from .synthesizer import synthesizer_factorized_random as synthesizer_factorized_random
from .synthesizer import synthesizer_mixture as synthesizer_mixture
from .synthesizer import synthesizer_random as synthesizer_random
from .linformer import linformer as linformer
from .memory_compressed import memory_compressed as memory_compressed
from .nystrom import nystrom as nystrom
from .set import induced_set as induced_set
from .spatial_reduction import spatial_reduction as spatial_reduction
