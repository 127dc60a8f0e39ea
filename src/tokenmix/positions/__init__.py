"""Position encodings and biases."""

from .learned import LearnedPositions
from .rotary import RotaryPositions

__all__ = [
    "LearnedPositions",
    "RotaryPositions",
]
