"""The numbers of one text in one model: what enters and leaves each mixer, and how it comes about."""

from __future__ import annotations

import torch
from torch import nn

from ...errors import MixerError
from ...models.encoder import Encoder
from ...models.lm import LM
from ...models.seq2seq import Seq2Seq
from .explained import Explained, Tokenizer
from .prediction import explain_encoder, explain_language_model
from .translation import explain_translation


@torch.no_grad()
def explain(model: nn.Module, words: Tokenizer, text: str, name: str = "model") -> Explained:
    """Let a model read a text, and collect what happens on the way.

    An encoder-decoder translates it greedily, a language model predicts each next token and goes on, and an encoder
    says what each token is when it is hidden, or the class of the text.

    Args:
        name: of the model, on the page.

    Raises:
        MixerError: if the model is of another kind, or the text is empty, too long, or has no piece that it knows.
    """
    if isinstance(model, Seq2Seq):
        return explain_translation(model, words, text, name)
    if isinstance(model, LM):
        return explain_language_model(model, words, text, name)
    if isinstance(model, Encoder):
        return explain_encoder(model, words, text, name)
    raise MixerError(
        f"look sentence: got a {type(model).__name__}; give an encoder-decoder (Seq2Seq), a language model (LM) or a "
        + "text encoder (Encoder)."
    )
