"""The numbers of one text in a language model, which predicts what follows, and in an encoder, which sees all of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ...models.encoder import Encoder
from ...models.lm import LM
from .explained import (
    CHOICES,
    Choices,
    Entered,
    Explained,
    Tokenizer,
    check_length,
    likeliest_pieces,
    tokens_of,
    without_positions,
)
from .sites import Place, Site, record_mixers, sites_of

WRITTEN = 24
"""The most tokens by which a language model continues the text."""
LAYERS = 6
"""The most layers that are followed; of more, some that are spread evenly, with the first and the last."""
EXAMPLE = "To be or not to be"


def explain_language_model(model: LM, words: Tokenizer, text: str, name: str) -> Explained:
    """Let a model read a text, predict each next token and go on greedily, and collect what happens on the way."""
    tokens = _read(model, words, text)
    if tokens.shape[1] < 2:
        raise MixerError(
            f"look sentence: the text {text!r} is one token, after which nothing is left to predict; give more."
        )
    loss = partial(_next_loss, model, tokens)
    sites, logits = _read_sites(model, "lm", tokens, loss)
    probabilities = logits.softmax(-1)
    chances = probabilities[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()
    unordered, unordered_loss = None, None
    if model.positions is not None:
        with without_positions(model):
            unordered, unordered_loss = _continue_text(model, words, tokens), loss()
    entered = _embed_tokens(model, words, tokens)
    return Explained(
        name=name,
        kind="lm",
        text=text,
        written=_continue_text(model, words, tokens),
        source=entered,
        target=entered,
        sites=sites,
        choices=likeliest_pieces(words, probabilities),
        unordered=unordered,
        unordered_loss=unordered_loss,
        loss=loss(),
        parameters=sum(p.numel() for p in model.parameters()),
        chances=chances,
        layers=len(model.blocks) * model.times,
    )


def explain_encoder(model: Encoder, words: Tokenizer, text: str, name: str) -> Explained:
    """Let an encoder say what each token is when it is hidden, or the class of the text; collect what happens.

    Raises:
        MixerError: if the model has no classes and the tokenizer has no token that hides another (``mask``).
    """
    tokens = _read(model, words, text)
    asked = _text_places(words, tokens)
    hidden = None if model.config.classes else _hidden(words, tokens, asked)
    loss: Callable[[], float]
    if hidden is None:
        loss = partial(_class_loss, model, tokens, model(tokens).argmax(-1))
    else:
        loss = partial(_hidden_loss, model, hidden, asked, tokens)
    sites, _ = _read_sites(model, "both", tokens, loss)
    choices, written = _likeliest_classes(model, words, tokens), ""
    chances: list[float | None] | None = None
    if hidden is None:
        written = choices[0][0][0]
    else:
        probabilities = _of_hidden(model, hidden, asked).softmax(-1)
        own = probabilities.gather(1, tokens[0, asked, None])[:, 0].tolist()
        choices, chances = [[] for _ in tokens[0]], [None] * tokens.shape[1]
        for t, likeliest, chance in zip(asked.tolist(), likeliest_pieces(words, probabilities), own, strict=True):
            choices[t], chances[t] = likeliest, chance
    unordered, unordered_loss = None, None
    if model.positions is not None:
        with without_positions(model):
            unordered = _likeliest_classes(model, words, tokens)[0][0][0] if hidden is None else ""
            unordered_loss = loss()
    entered = _embed_tokens(model, words, tokens)
    return Explained(
        name=name,
        kind="encoder",
        text=text,
        written=written,
        source=entered,
        target=entered,
        sites=sites,
        choices=choices,
        unordered=unordered,
        unordered_loss=unordered_loss,
        loss=loss(),
        parameters=sum(p.numel() for p in model.parameters()),
        chances=chances,
        classes=hidden is None,
        layers=len(model.blocks),
    )


def places_of(model: LM | Encoder, part: str) -> list[Place]:
    """Return the mixers of a model in order."""
    specs = model.config.specs()
    return [
        Place(part, layer, spec["name"], block.mixer)
        for layer, (spec, block) in enumerate(zip(specs, model.blocks, strict=True))
    ]


def _read(model: LM | Encoder, words: Tokenizer, text: str) -> Tensor:
    ids = tokens_of(words, text, EXAMPLE)
    check_length(ids, model.max_len)
    return torch.tensor([ids], device=model.embed.weight.device)


def _read_sites(model: LM | Encoder, part: str, tokens: Tensor, loss: Callable[[], float]) -> tuple[list[Site], Tensor]:
    """Return the sites of a model that reads the tokens, and its first row of outputs."""
    with record_mixers(places_of(model, part)) as calls:
        output = model(tokens)[0]
    calls.sort(key=lambda call: call.place.layer)
    last, count = len(calls) - 1, min(LAYERS, len(calls))
    shown = {round(n * last / max(1, count - 1)) for n in range(count)}
    return sites_of([calls[n] for n in sorted(shown)], loss), output


def _next_loss(model: LM, tokens: Tensor) -> float:
    return float(F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]))


def _continue_text(model: LM, words: Tokenizer, tokens: Tensor) -> str:
    """Return how a model goes on, as far as its length allows."""
    room = WRITTEN if model.max_len is None else min(WRITTEN, model.max_len - tokens.shape[1])
    if room < 1:
        return ""
    return words.decode(model.generate(tokens, room, temperature=0.0)[0, tokens.shape[1] :].tolist())


def _text_places(words: Tokenizer, tokens: Tensor) -> Tensor:
    """Return the places of the tokens that stand for text, of which alone training hides some."""
    ends = getattr(words, "framing", ())
    return torch.tensor([t for t, token in enumerate(tokens[0].tolist()) if token not in ends], device=tokens.device)


def _hidden(words: Tokenizer, tokens: Tensor, asked: Tensor) -> Tensor:
    """Return the tokens once for each place that is asked for (N, T), with the token there hidden."""
    mask = getattr(words, "mask", None)
    if mask is None:
        raise MixerError(
            "look sentence: the encoder predicts hidden tokens, but its tokenizer has no token to hide them."
        )
    return tokens.repeat(len(asked), 1).scatter(1, asked[:, None], mask)


def _of_hidden(model: Encoder, hidden: Tensor, asked: Tensor) -> Tensor:
    """Return the logits (N, V) of the hidden token of each row."""
    return model(hidden, chosen=asked[:, None])[:, 0]


def _hidden_loss(model: Encoder, hidden: Tensor, asked: Tensor, tokens: Tensor) -> float:
    return float(F.cross_entropy(_of_hidden(model, hidden, asked), tokens[0, asked]))


def _class_loss(model: Encoder, tokens: Tensor, likeliest: Tensor) -> float:
    return float(F.cross_entropy(model(tokens), likeliest))


def _likeliest_classes(model: Encoder, words: Tokenizer, tokens: Tensor) -> Choices:
    """Return the likeliest classes, by name or else by number; one row without any, if the model predicts tokens."""
    if not model.config.classes:
        return [[]]
    found = model(tokens).softmax(-1)[0].topk(min(CHOICES, model.config.classes))
    names = getattr(words, "labels", None) or [str(n) for n in range(model.config.classes)]
    return [[(names[n], chance) for n, chance in zip(found.indices.tolist(), found.values.tolist(), strict=True)]]


def _embed_tokens(model: LM | Encoder, words: Tokenizer, tokens: Tensor) -> Entered:
    pieces: Callable[[list[int]], list[str]] = getattr(words, "in_context", words.pieces)
    ids, embedded = tokens[0].tolist(), model.embed(tokens)[0]
    return Entered(pieces(ids), ids, embedded, _position_terms(model, tokens))


def _position_terms(model: LM | Encoder, tokens: Tensor) -> Tensor | None:
    """Return what positions add to the embedding of each token (T, D)."""
    if model.positions is None:
        return None
    if getattr(model.positions, "reads_tokens", False):
        return model.positions(tokens, None, torch.zeros_like(tokens[:, 0]))[0][0]
    return model.positions(torch.arange(tokens.shape[1], device=tokens.device)[None])[0]
