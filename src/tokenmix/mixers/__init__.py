"""The table of mixers, and how to build one from its name."""

from .base import QKVO, About, Capabilities, Mixer
from .by_name import MixerName, build_mixer
from .cost import Cost, MixingCost
from .examples import example_mixer, state_growth
from .facts import Kernels, mixer_options
from .parts.aux_losses import aux_losses
from .parts.shared import check_positions, valid_mask
from .segments import Segment
from .state import State, chunk_positions, merge, register_state, reorder, state_bytes, token_positions
from .table import *  # noqa: F403  (every class that is a row of MIXERS, and the table itself)
from .table import CORE, MIXERS, is_softmax, register_mixer

__all__ = [
    "About",
    "CORE",
    "Capabilities",
    "Cost",
    "Kernels",
    "MIXERS",
    "Mixer",
    "MixerName",
    "MixingCost",
    "QKVO",
    "Segment",
    "State",
    "aux_losses",
    "build_mixer",
    "check_positions",
    "chunk_positions",
    "example_mixer",
    "is_softmax",
    "merge",
    "mixer_options",
    "register_mixer",
    "register_state",
    "reorder",
    "state_bytes",
    "state_growth",
    "token_positions",
    "valid_mask",
]
__all__ += {cls.__name__ for cls in MIXERS.values()}
__all__.sort()
