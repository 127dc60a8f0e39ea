"""Encoders with a head: classify sequences and tokens, find answers in a text, and predict masked tokens.

With ``is_causal=True`` in the config they read from the left only.

transformers reads class annotations at run time, so this file has no ``from __future__ import annotations``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import (
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from ...models.encoder import pool_tokens
from ...types import Options
from .configuration import TokenMixConfig
from .modeling import TokenMixModel, TokenMixPreTrainedModel


class TokenMixHead(TokenMixPreTrainedModel):
    """A ``TokenMixModel`` with a prediction head."""

    def __init__(self, config: TokenMixConfig):
        super().__init__(config.but(is_causal=bool(config.is_causal)))
        self.model = TokenMixModel(self.config)
        share = config.classifier_dropout
        self.dropout = nn.Dropout(config.hidden_dropout_prob if share is None else share)

    def features(self, given: Options) -> tuple[Any, Options]:
        """Return the trunk's output, and the arguments that belong to the loss."""
        loss_options = {"num_items_in_batch": given.pop("num_items_in_batch")} if "num_items_in_batch" in given else {}
        return self.model(**{"use_cache": False} | given), loss_options


class TokenMixForSequenceClassification(TokenMixHead):
    """Predict one label, several labels or numbers (``problem_type``) for each sequence.

    Args:
        config: a ``TokenMixConfig``; its ``classifier_pooling`` selects the features to classify.
    """

    def __init__(self, config: TokenMixConfig):
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> SequenceClassifierOutput:
        """Map input_ids (B, L) to logits (B, labels)."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        out, loss_options = self.features(inputs | kwargs)
        how = self.config.classifier_pooling or ("last" if self.config.is_causal else "mean")
        valid = None if attention_mask is None else attention_mask.to(out.last_hidden_state.device) != 0
        features = pool_tokens(out.last_hidden_state, valid, "first" if how == "cls" else how)
        logits = self.score(self.dropout(features))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config, **loss_options
            )
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class TokenMixForTokenClassification(TokenMixHead):
    """Predict a label for each token."""

    def __init__(self, config: TokenMixConfig):
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> TokenClassifierOutput:
        """Map input_ids (B, T) to logits (B, T, labels); labels of -100 are ignored."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        out, loss_options = self.features(inputs | kwargs)
        logits = self.score(self.dropout(out.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, self.config, **loss_options)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)


class TokenMixForQuestionAnswering(TokenMixHead):
    """Predict where in the sequence an answer starts and ends."""

    def __init__(self, config: TokenMixConfig):
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: object,
    ) -> QuestionAnsweringModelOutput:
        """Map input_ids (B, T) to start_logits and end_logits (B, T), lowest at padding.

        start_positions and end_positions (B,) beyond T are ignored.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        out, loss_options = self.features(inputs | kwargs)
        logits = self.qa_outputs(self.dropout(out.last_hidden_state))
        if attention_mask is not None:
            logits = logits.masked_fill(attention_mask.to(logits.device)[..., None] == 0, torch.finfo(logits.dtype).min)
        start, end = (part.contiguous() for part in logits.unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions, **loss_options)
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=out.hidden_states
        )


class TokenMixForMaskedLM(TokenMixHead):
    """Predict masked tokens from both sides."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TokenMixConfig):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> MaskedLMOutput:
        """Map input_ids (B, T) to logits (B, T, vocab); labels of -100 are ignored."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        out, loss_options = self.features(inputs | kwargs)
        logits = self.lm_head(out.last_hidden_state)
        loss = (
            None
            if labels is None
            else self.loss_function(logits, labels.contiguous(), vocab_size=self.config.vocab_size, **loss_options)
        )
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
