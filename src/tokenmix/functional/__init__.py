"""Pure functions on tensors: the numerically safe form of each mixer, and the choice of kernel. No parameters."""

from ._backend import use_backend as use_backend
from .aft import aft_full as aft_full
from .aft import aft_local as aft_local
from .aft import aft_simple as aft_simple
from .aft_conv import aft_conv as aft_conv
from .attention import attention as attention
from .linformer import linformer as linformer
from .memory_compressed import memory_compressed as memory_compressed
from .nystrom import nystrom as nystrom
from .set import induced_set as induced_set
from .spatial_reduction import spatial_reduction as spatial_reduction
