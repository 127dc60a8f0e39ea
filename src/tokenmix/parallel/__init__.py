"""One sequence over many ranks, and the exact gradient through one sequence of any length."""

from .long_backward import LongGradient, LongStep, long_backward
from .moments import shared_moments
from .ranks import Ranks, context_parallel, shared_mean, sum_gradients
from .sim import SimWorld, Traffic

__all__ = [
    "LongGradient",
    "LongStep",
    "Ranks",
    "SimWorld",
    "Traffic",
    "context_parallel",
    "long_backward",
    "shared_mean",
    "shared_moments",
    "sum_gradients",
]
