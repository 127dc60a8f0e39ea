"""Pure functions on tensors: the numerically safe form of each mixer, and the choice of kernel. No parameters."""

from ._backend import use_backend as use_backend
from .aft import aft_full as aft_full
from .aft import aft_local as aft_local
from .aft import aft_simple as aft_simple
from .aft_conv import aft_conv as aft_conv
from .attention import attention as attention
from .reformer import reformer as reformer
from .routing import routing as routing
from .sinkhorn import sinkhorn as sinkhorn
