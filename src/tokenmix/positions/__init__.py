"""Position encodings and biases."""

from .learned import LearnedPositions
from .rotary import RotaryPositions
from .sinusoidal import SinusoidalPositions

__all__ = [
    "LearnedPositions",
    "RotaryPositions",
    "SinusoidalPositions",
]
