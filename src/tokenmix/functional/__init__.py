"""Pure functions on tensors: the numerically safe form of each mixer, and the choice of kernel. No parameters."""

from ._backend import use_backend as use_backend
from .aft import aft_full as aft_full
from .aft import aft_local as aft_local
from .aft import aft_simple as aft_simple
from .aft_conv import aft_conv as aft_conv
from .attention import attention as attention
from .axial import axial as axial
from .compressive import compressive as compressive
from .image_local import image_local as image_local
from .transformer_xl import transformer_xl as transformer_xl
