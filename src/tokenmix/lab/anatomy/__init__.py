"""`tokenmix look tokens`: what the tokens of a Vision Transformer hold, measured as in "Vision Transformers Need
Registers".
"""

from .measure import Anatomy, dissect
from .subject import Reading, Subject, read

__all__ = ["Anatomy", "Reading", "Subject", "dissect", "read"]
