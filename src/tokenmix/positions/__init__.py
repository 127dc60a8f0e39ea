"""Position encodings, and biases for pairs of positions."""

from .learned import LearnedPositions
from .pair import PAIR_POSITIONS, ALiBi, Fire, Kerple, PairPositions, Sandwich, T5Bias, build_pair_positions
from .rotary import RotaryPositions
from .sinusoidal import SinusoidalPositions

__all__ = [
    "ALiBi",
    "Fire",
    "Kerple",
    "LearnedPositions",
    "PAIR_POSITIONS",
    "PairPositions",
    "RotaryPositions",
    "Sandwich",
    "SinusoidalPositions",
    "T5Bias",
    "build_pair_positions",
]
