"""Pure functions on tensors: the numerically safe form of each mixer, and the choice of kernel. No parameters."""

from ._backend import use_backend as use_backend
from .aft import aft_full as aft_full
from .aft import aft_local as aft_local
from .aft import aft_simple as aft_simple
from .aft_conv import aft_conv as aft_conv
from .attention import attention as attention
from .patterns import fixed as fixed
from .patterns import local as local
from .patterns import strided as strided
from .patterns_global import bigbird as bigbird
from .patterns_global import longformer as longformer
