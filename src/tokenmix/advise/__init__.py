"""`tokenmix advise`: whether to replace a model's attention, by what, and the gain at given lengths on this machine."""

from .advice import Advice as Advice
from .advice import advise as advise
from .amdahl import Crossing as Crossing
from .amdahl import bound as bound
from .amdahl import first_length as first_length
from .loading import Host as Host
from .loading import load_host as load_host
from .measuring import Share as Share
