"""The papers' equations as they are written: float64, loops and sums over t', no tricks. Library code never imports this."""

from .aft import aft_conv as aft_conv
from .aft import aft_full as aft_full
from .aft import aft_local as aft_local
from .aft import aft_simple as aft_simple
from .attention import attention as attention
from .patterns import bigbird as bigbird
from .patterns import fixed as fixed
from .patterns import local as local
from .patterns import longformer as longformer
from .patterns import strided as strided
