"""The table of mixers, functions that build a mixer from its name, and helpers for mixers of your own."""

from ..functional.layout.heads import by_head, join_heads
from ..functional.layout.masks import allowed, zero_masked
from ..functional.sums.nonfinite import guard_nonfinite, propagate_nonfinite_chunk
from ..kernels.precision import at_least_float32, exact
from ..system.deprecation import warn_deprecated
from .base import QKVO, About, Capabilities, Facts, Inputs, Mixer
from .cost import Cost, MixingCost
from .examples import example_mixer, state_growth
from .facts import Kernels, mixer_options, required_options
from .parts.aux_losses import aux_losses
from .parts.options import check_heads
from .parts.shared import add_projections, check_positions, largest_dot, valid_mask
from .registration import build_mixer
from .segments import Segment
from .state import State, chunk_positions, merge, register_state, reorder, state_bytes, token_positions
from .table import *  # noqa: F403  (every class that is a row of MIXERS, and the table itself)
from .table import CORE, MIXERS, is_softmax, register_mixer

__all__ = [
    "About",
    "CORE",
    "Capabilities",
    "Cost",
    "Facts",
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
    "guard_nonfinite",
    "is_softmax",
    "join_heads",
    "largest_dot",
    "merge",
    "mixer_options",
    "propagate_nonfinite_chunk",
    "register_mixer",
    "register_state",
    "reorder",
    "required_options",
    "state_bytes",
    "state_growth",
    "token_positions",
    "valid_mask",
    "zero_masked",
]
__all__ += {cls.__name__ for cls in MIXERS.values()}
__all__.sort()

_MOVED = ("Performer", "SynthesizerMixture")
_RENAMED = {"hides": "guard_nonfinite", "honest_chunk": "propagate_nonfinite_chunk"}


def __getattr__(name: str) -> object:
    if name in _MOVED:
        warn_deprecated(f"tokenmix.mixers.{name}", f"tokenmix.contrib.{name}", removed_in="0.4")
        return next(cls for cls in MIXERS.values() if cls.__name__ == name)
    if name in _RENAMED:  # `from` shows no AttributeError
        raise ImportError(f"tokenmix.mixers.{name} is now tokenmix.mixers.{_RENAMED[name]}.")
    raise AttributeError(f"module 'tokenmix.mixers' has no attribute {name!r}.")
