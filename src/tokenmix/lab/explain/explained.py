"""What the page shows of one model and one text, and what all kinds of models ask of a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ...errors import MixerError
from .sites import Site

CHOICES = 5
"""How many candidates for a word are kept."""
LONGEST = 256
"""The most tokens that a page shows."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens that a model reads of a text."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """Return each token as readable text."""


class Entered(NamedTuple):
    """Tokens as they enter: their text, numbers, embeddings (T, D), and what positions add (T, D)."""

    pieces: list[str]
    ids: list[int]
    embedded: Tensor
    positions: Tensor | None


Choices = list[list[tuple[str, float]]]
"""For each row the likeliest pieces and their probabilities."""


@dataclass
class Explained:
    """What one model does with one text.

    Attributes:
        kind: "seq2seq" (it translates the text), "lm" (it predicts each next token) or "encoder" (it says what a hidden
            token is, or the class of the text).
        written: the translation, or how a language model goes on; the likeliest class; "" of other encoders.
        source, target: the tokens that are read and written; the same ones unless the model translates.
        choices: for each row of the target the likeliest next pieces; of an encoder what each hidden token would be, or
            one row of classes; empty for tokens that only begin or end a text and are never hidden.
        chances: of a language model, the probability of each token of the text after the first; of an encoder without
            classes, that of each token when it is hidden, None for those that never are.
        unordered: what is written when nothing is added for positions; None: the model adds nothing.
        unordered_loss: the loss then.
        loss: mean negative log-probability of what was written; of a language model, of the text; of an encoder, of
            its hidden tokens or of the likeliest class.
        classes: whether ``choices`` are classes.
        layers: how many layers a language model or an encoder has, of which ``sites`` may hold some.
    """

    name: str
    kind: str
    text: str
    written: str
    source: Entered
    target: Entered
    sites: list[Site]
    choices: Choices
    unordered: str | None
    unordered_loss: float | None
    loss: float
    parameters: int
    chances: Sequence[float | None] | None = None
    classes: bool = False
    layers: int | None = None


def tokens_of(words: Tokenizer, text: str, example: str) -> list[int]:
    """Return the tokens of a text, at least one of which the model knows.

    Raises:
        MixerError: if the text is empty or no Unicode, or the tokenizer knows no piece of it; ``example`` is one that
            works.
    """
    if not text.strip():
        raise MixerError(f"look sentence: the text is empty; give one, such as --text {example!r}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MixerError(f"look sentence: the text {text!r} is not Unicode; give it in UTF-8.") from None
    ids = words.encode(text)
    unknown = getattr(words, "unknown", None)
    if not ids or all(i == unknown for i in ids):
        raise MixerError(f"look sentence: the model knows no piece of {text!r}; give a text of the language it reads.")
    return ids


def check_length(ids: list[int], longest: int | None, end: bool = False) -> None:
    """Refuse tokens that are more than a model reads or a page shows.

    Args:
        longest: what the model reads; None: it has no longest.
        end: whether an end follows the tokens.
    """
    if longest is not None and len(ids) + end > longest:
        pieces = f"{len(ids)} pieces and an end" if end else f"{len(ids)} tokens"
        raise MixerError(
            f"look sentence: the text has {pieces}, but the model reads at most {longest}; give a shorter one."
        )
    if len(ids) > LONGEST:
        raise MixerError(
            f"look sentence: the text has {len(ids)} tokens, but a page shows at most {LONGEST}; give a shorter one."
        )


def likeliest_pieces(words: Tokenizer, probabilities: Tensor) -> Choices:
    """Return the likeliest pieces of each row of probabilities (T, V)."""
    found = probabilities.topk(min(CHOICES, probabilities.shape[-1]))
    return [
        list(zip(words.pieces(row.tolist()), chances.tolist(), strict=True))
        for row, chances in zip(found.indices, found.values, strict=True)
    ]


@contextmanager
def without_positions(*models: Any) -> Any:
    """Add nothing for positions inside the block."""
    kept = [model.positions for model in models]
    for model in models:
        model.positions = None
    try:
        yield
    finally:
        for model, positions in zip(models, kept, strict=True):
            model.positions = positions
