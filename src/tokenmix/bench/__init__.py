"""Measurements: decoding, training rate, state size."""

from .compare import stops_winning as stops_winning
from .decode import Decoding as Decoding
from .decode import decoding as decoding
from .decode import state_after as state_after
from .decode import training_rate as training_rate
