"""The papers' equations as they are written: float64, loops and sums over t', no tricks. Library code never imports this."""

from .aft import aft_conv as aft_conv
from .aft import aft_full as aft_full
from .aft import aft_local as aft_local
from .aft import aft_simple as aft_simple
from .attention import attention as attention
from .axial import axial as axial
from .compressive import compressive as compressive
from .image_local import image_local as image_local
from .transformer_xl import transformer_xl as transformer_xl
