"""Register our models with transformers' Auto classes when this package is imported."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from ..surgery.auto_classes import register_converted
from .configuration import TokenMixConfig
from .heads import (
    TokenMixForMaskedLM,
    TokenMixForQuestionAnswering,
    TokenMixForSequenceClassification,
    TokenMixForTokenClassification,
)
from .images import TokenMixForImageClassification
from .modeling import TokenMixForCausalLM, TokenMixModel
from .seq2seq import TokenMixForSeq2SeqLM

AUTO = (
    (AutoModel, TokenMixModel),
    (AutoModelForCausalLM, TokenMixForCausalLM),
    (AutoModelForMaskedLM, TokenMixForMaskedLM),
    (AutoModelForQuestionAnswering, TokenMixForQuestionAnswering),
    (AutoModelForSequenceClassification, TokenMixForSequenceClassification),
    (AutoModelForTokenClassification, TokenMixForTokenClassification),
    (AutoModelForImageClassification, TokenMixForImageClassification),
    (AutoModelForSeq2SeqLM, TokenMixForSeq2SeqLM),
)


def register() -> None:
    """Register our models and hosts with mixers, which ``AutoModelForCausalLM.from_pretrained(folder)`` then loads."""
    AutoConfig.register(TokenMixConfig.model_type, TokenMixConfig, exist_ok=True)
    for auto, model in AUTO:
        auto.register(TokenMixConfig, model, exist_ok=True)
    register_converted()


register()
