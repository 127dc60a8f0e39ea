"""The papers' equations as they are written: float64, loops and sums over t', no tricks. Library code never imports this."""

from .aft import aft_conv as aft_conv
from .aft import aft_full as aft_full
from .aft import aft_local as aft_local
from .aft import aft_simple as aft_simple
from .attention import attention as attention
from .reformer import reformer as reformer
from .routing import routing as routing
from .sinkhorn import sinkhorn as sinkhorn
