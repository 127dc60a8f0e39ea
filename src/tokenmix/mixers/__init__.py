"""The table of mixers, functions that build a mixer from its name, and helpers for mixers of your own."""

from ..functional.layout.heads import by_head, join_heads
from ..functional.layout.masks import allowed, zero_masked
from ..functional.sums.nonfinite import hides, honest_chunk
from ..kernels.precision import at_least_float32, exact
from .base import QKVO, About, Capabilities, Inputs, Mixer
from .cost import Cost, MixingCost
from .examples import example_mixer, state_growth
from .facts import Kernels, mixer_options
from .outside import build_mixer
from .parts.aux_losses import aux_losses
from .parts.options import check_heads
from .parts.shared import add_projections, check_positions, largest_dot, valid_mask
from .segments import Segment
from .state import State, chunk_positions, merge, register_state, reorder, state_bytes, token_positions
from .table import *  # noqa: F403  (every class that is a row of MIXERS, and the table itself)
from .table import CORE, MIXERS, is_softmax, register_mixer

__all__ = [
    "About",
    "CORE",
    "Capabilities",
    "Cost",
    "Inputs",
    "Kernels",
    "MIXERS",
    "Mixer",
    "MixingCost",
    "QKVO",
    "Segment",
    "State",
    "add_projections",
    "allowed",
    "at_least_float32",
    "aux_losses",
    "build_mixer",
    "by_head",
    "check_heads",
    "check_positions",
    "chunk_positions",
    "exact",
    "example_mixer",
    "hides",
    "honest_chunk",
    "is_softmax",
    "join_heads",
    "largest_dot",
    "merge",
    "mixer_options",
    "register_mixer",
    "register_state",
    "reorder",
    "state_bytes",
    "state_growth",
    "token_positions",
    "valid_mask",
    "zero_masked",
]
__all__ += {cls.__name__ for cls in MIXERS.values()}
__all__.sort()
