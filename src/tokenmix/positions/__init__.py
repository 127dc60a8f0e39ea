"""Position encodings and biases."""

from .learned import LearnedPositions as LearnedPositions
from .rotary import RotaryPositions as RotaryPositions
