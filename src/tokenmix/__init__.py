"""Token mixers for PyTorch: layers that can take the place of attention."""

from . import functional as functional
from .errors import MixerError as MixerError
from .functional import use_backend as use_backend
from .kernels.fast_linear import fast_linear as fast_linear
from .mixers import MIXERS as MIXERS
from .mixers import Capabilities as Capabilities
from .mixers import Mixer as Mixer
from .mixers import aux_losses as aux_losses
from .mixers import build_mixer as build_mixer
from .mixers import merge as merge
from .mixers import register_mixer as register_mixer
from .mixers import reorder as reorder
from .mixers import state_bytes as state_bytes

__version__ = "0.1.0"
