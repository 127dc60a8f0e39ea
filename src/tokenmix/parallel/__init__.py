"""One sequence over many ranks, and the exact gradient through one sequence of any length."""

from .long_backward import LongGradient, long_backward
from .sim import SimWorld, Traffic

__all__ = ["LongGradient", "SimWorld", "Traffic", "long_backward"]
