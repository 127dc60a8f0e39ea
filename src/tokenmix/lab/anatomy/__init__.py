"""`tokenmix look tokens`: what the tokens of a Vision Transformer hold, measured as in "Vision Transformers Need
Registers".
"""

from .measure import Anatomy, dissect
from .subject import ProbedModel, Reading, read

__all__ = [
    "Anatomy",
    "ProbedModel",
    "Reading",
    "dissect",
    "read",
]
