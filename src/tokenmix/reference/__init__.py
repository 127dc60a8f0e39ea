"""The papers' equations as they are written: float64, loops and sums over t', no tricks. Library code never imports this."""

from .aft import aft_conv as aft_conv
from .aft import aft_full as aft_full
from .aft import aft_local as aft_local
from .aft import aft_simple as aft_simple
from .attention import attention as attention
from .fourier import fourier as fourier
from .gmlp import gmlp as gmlp
from .lambda_layer import lambda_layer as lambda_layer
from .lightconv import lightconv as lightconv
from .mlp_mixer import mlp_mixer as mlp_mixer
from .pooling import pooling as pooling
