"""Encoder and decoder with a cross mixer in every decoder layer, for translation and summarisation.

transformers reads class annotations at run time, so this file has no ``from __future__ import annotations``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import can_return_tuple

from ...errors import MixerError
from ...types import Options
from ..cache_names import returned_cache
from .cache import input_cache, name_cache_output
from .configuration import TokenMixConfig
from .generation import FiniteGenerationMixin
from .modeling import TokenMixModel, TokenMixPreTrainedModel, select_tokens


class TokenMixForSeq2SeqLM(TokenMixPreTrainedModel, FiniteGenerationMixin):
    """A bidirectional encoder (``encoder_mixers``), a causal decoder (``mixers``) with ``cross_mixers``, and a head.

    Args:
        config: a ``TokenMixConfig``; ``cross_mixers`` default to softmax attention, ``encoder_mixers`` to ``mixers``.
            Generation starts with ``decoder_start_token_id``, else ``bos_token_id`` or ``pad_token_id``. With
            ``tie_word_embeddings`` encoder, decoder and head share one table.

    Raises:
        MixerError: if a mixer of the decoder has no causal form, or a cross mixer takes no context.
    """

    base_model_prefix = ""  # there is no separate trunk: a task only adds a head over the decoder
    _tied_weights_keys = {
        "encoder.embed_tokens.weight": "decoder.embed_tokens.weight",
        "lm_head.weight": "decoder.embed_tokens.weight",
    }

    def __init__(self, config: TokenMixConfig):
        cross = config.cross_mixers or [{"name": "attention"}]
        super().__init__(config.but(is_encoder_decoder=True, cross_mixers=cross, is_causal=None))
        alone: Options = {"is_encoder_decoder": False, "tie_word_embeddings": False}
        mixers, layers = config.encoder_mixers or config.mixers, config.encoder_layers or config.num_hidden_layers
        self.encoder = TokenMixModel(
            self.config.but(**alone, is_causal=False, cross_mixers=None, mixers=mixers, num_hidden_layers=layers)
        )
        self.decoder = TokenMixModel(self.config.but(**alone, is_causal=True))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_type = "ForMaskedLM"  # cross-entropy without a shift: each label is at the row that predicts it
        if not self.decoder.streams:
            self.config.use_cache = self.generation_config.use_cache = False
        self.post_init()

    def get_encoder(self, *args: object, **kwargs: object) -> TokenMixModel:
        """Return the encoder, which ``generate()`` calls once."""
        return self.encoder

    def get_decoder(self, *args: object, **kwargs: object) -> TokenMixModel:
        """Return the decoder."""
        return self.decoder

    def get_input_embeddings(self) -> nn.Module:
        """Return the decoder's embedding."""
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        """Set one embedding for encoder and decoder."""
        self.encoder.embed_tokens = self.decoder.embed_tokens = value

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels (B, T) right by one after the start token; -100 becomes padding."""
        config = self.config
        start = next(
            (n for n in (config.decoder_start_token_id, config.bos_token_id, config.pad_token_id) if n is not None),
            None,
        )
        if start is None:
            start_token = "labels need a start token"
            raise MixerError(f"TokenMixForSeq2SeqLM: {start_token}; set decoder_start_token_id in the config.")
        shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)
        return shifted.masked_fill(shifted == -100, config.pad_token_id or 0)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Map input_ids (B, S) and decoder_input_ids (B, T) to logits (B, T, vocab).

        Without decoder inputs, ``labels`` (B, T) provide them.

        Args:
            attention_mask: (B, S), 1 = valid, of the encoder. decoder_attention_mask: (B, tokens in the cache + T).
            encoder_outputs: of ``get_encoder()``, so that it need not run again.
            logits_to_keep: compute only the last N logits, or those at these indices; 0: all.
            past_key_values: the name of ``cache`` before transformers 5.24.
        """
        loss_options = (
            {"num_items_in_batch": kwargs.pop("num_items_in_batch")} if "num_items_in_batch" in kwargs else {}
        )
        kwargs.pop("cache_position", None)
        if encoder_outputs is None:
            wanted = {name: kwargs[name] for name in ("output_hidden_states",) if name in kwargs}
            encoder_outputs = self.encoder(
                input_ids, attention_mask, inputs_embeds=inputs_embeds, use_cache=False, **wanted
            )
        elif isinstance(encoder_outputs, tuple):
            encoder_outputs = BaseModelOutput(*encoder_outputs[:2])
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        context = {"encoder_hidden_states": encoder_outputs.last_hidden_state, "encoder_attention_mask": attention_mask}
        cache = input_cache(type(self).__name__, cache, past_key_values)
        options = {"cache": cache, "inputs_embeds": decoder_inputs_embeds, "use_cache": use_cache}
        out = self.decoder(decoder_input_ids, decoder_attention_mask, **context, **options, **kwargs)
        logits = self.lm_head(select_tokens(out.last_hidden_state, logits_to_keep))
        loss = (
            None
            if labels is None
            else self.loss_function(logits, labels.contiguous(), vocab_size=self.config.vocab_size, **loss_options)
        )
        found = {**name_cache_output(returned_cache(out)), "decoder_hidden_states": out.hidden_states}
        found |= {
            "encoder_last_hidden_state": encoder_outputs.last_hidden_state,
            "encoder_hidden_states": getattr(encoder_outputs, "hidden_states", None),
        }
        return Seq2SeqLMOutput(loss=loss, logits=logits, **found)
