"""Use our mixers in transformers: models registered with the Auto classes, and a quick trial inside other models."""

from . import require as require
from .attention_interface import register_attention as register_attention
from .cache import TokenMixStateLayer as TokenMixStateLayer
from .configuration import TokenMixConfig as TokenMixConfig
from .export import export_run as export_run
from .heads import TokenMixForMaskedLM as TokenMixForMaskedLM
from .heads import TokenMixForQuestionAnswering as TokenMixForQuestionAnswering
from .heads import TokenMixForSequenceClassification as TokenMixForSequenceClassification
from .heads import TokenMixForTokenClassification as TokenMixForTokenClassification
from .images import TokenMixForImageClassification as TokenMixForImageClassification
from .modeling import TokenMixForCausalLM as TokenMixForCausalLM
from .modeling import TokenMixModel as TokenMixModel
from .registration import register as register
from .seq2seq import TokenMixForSeq2SeqLM as TokenMixForSeq2SeqLM
