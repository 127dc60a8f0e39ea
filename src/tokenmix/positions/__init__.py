"""Position encodings and biases."""

from .learned import LearnedPositions as LearnedPositions
