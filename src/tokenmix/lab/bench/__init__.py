"""Measurements: decoding, training rate, state size."""

from .compare import stops_winning
from .decode import Decoding, decoding, state_after, training_rate

__all__ = [
    "Decoding",
    "decoding",
    "state_after",
    "stops_winning",
    "training_rate",
]
