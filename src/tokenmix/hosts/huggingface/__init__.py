"""Use our mixers in transformers: models registered with the Auto classes, and a quick trial inside other models."""

from . import require
from .attention_interface import register_attention
from .back import from_transformers
from .cache import TokenMixStateLayer
from .configuration import TokenMixConfig
from .croppable import croppable_states
from .export import to_transformers
from .heads import (
    TokenMixForMaskedLM,
    TokenMixForQuestionAnswering,
    TokenMixForSequenceClassification,
    TokenMixForTokenClassification,
)
from .images import TokenMixForImageClassification
from .modeling import TokenMixForCausalLM, TokenMixModel
from .registration import register
from .seq2seq import TokenMixForSeq2SeqLM

__all__ = [
    "TokenMixConfig",
    "TokenMixForCausalLM",
    "TokenMixForImageClassification",
    "TokenMixForMaskedLM",
    "TokenMixForQuestionAnswering",
    "TokenMixForSeq2SeqLM",
    "TokenMixForSequenceClassification",
    "TokenMixForTokenClassification",
    "TokenMixModel",
    "TokenMixStateLayer",
    "croppable_states",
    "from_transformers",
    "register",
    "register_attention",
    "require",
    "to_transformers",
]
