"""`tokenmix advise`: whether to replace a model's attention, by what, and the gain at given lengths on this machine."""

from .advice import Advice, advise
from .amdahl import Crossing, bound, first_length
from .loading import Host, load_host
from .measuring import Share

__all__ = [
    "Advice",
    "Crossing",
    "Host",
    "Share",
    "advise",
    "bound",
    "first_length",
    "load_host",
]
