"""Position encodings, and biases for pairs of positions."""

from .added import ADDED_POSITIONS, build_added_positions
from .content import (
    CONTENT_POSITIONS,
    AdaptivePositions,
    ContentPositions,
    ContextualPositions,
    ShawPositions,
    build_logit_bias,
)
from .digits import AbacusPositions, CoupledPositions
from .learned import LearnedPositions
from .pair import PAIR_POSITIONS, ALiBi, Fire, Kerple, PairPositions, Sandwich, T5Bias, build_pair_positions
from .rotary import RotaryPositions
from .samplers import SAMPLERS
from .sinusoidal import SinusoidalPositions
from .smooth import SmoothPositions
from .xpos import XPositions

__all__ = [
    "ADDED_POSITIONS",
    "ALiBi",
    "AbacusPositions",
    "AdaptivePositions",
    "CONTENT_POSITIONS",
    "ContentPositions",
    "ContextualPositions",
    "CoupledPositions",
    "Fire",
    "Kerple",
    "LearnedPositions",
    "PAIR_POSITIONS",
    "PairPositions",
    "RotaryPositions",
    "SAMPLERS",
    "Sandwich",
    "ShawPositions",
    "SinusoidalPositions",
    "SmoothPositions",
    "T5Bias",
    "XPositions",
    "build_added_positions",
    "build_logit_bias",
    "build_pair_positions",
]
