"""Position encodings, and biases for pairs of positions."""

from .added import ADDED_POSITIONS, build_added_positions
from .digits import AbacusPositions, CoupledPositions
from .learned import LearnedPositions
from .pair import PAIR_POSITIONS, ALiBi, Fire, Kerple, PairPositions, Sandwich, T5Bias, build_pair_positions
from .rotary import RotaryPositions
from .samplers import SAMPLERS
from .sinusoidal import SinusoidalPositions

__all__ = [
    "ADDED_POSITIONS",
    "ALiBi",
    "AbacusPositions",
    "CoupledPositions",
    "Fire",
    "Kerple",
    "LearnedPositions",
    "PAIR_POSITIONS",
    "PairPositions",
    "RotaryPositions",
    "SAMPLERS",
    "Sandwich",
    "SinusoidalPositions",
    "T5Bias",
    "build_added_positions",
    "build_pair_positions",
]
