"""Our models under the names of transformers' Auto classes, from the import of the adapter on."""

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

from .configuration import TokenMixConfig
from .heads import TokenMixForMaskedLM, TokenMixForQuestionAnswering, TokenMixForSequenceClassification, TokenMixForTokenClassification
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
    """Make ``AutoModelForCausalLM.from_pretrained(folder)`` and the like know model_type "tokenmix"."""
    AutoConfig.register(TokenMixConfig.model_type, TokenMixConfig, exist_ok=True)
    for auto, model in AUTO:
        auto.register(TokenMixConfig, model, exist_ok=True)


register()
