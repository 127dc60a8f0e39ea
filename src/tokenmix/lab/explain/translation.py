"""The numbers of a translation by an encoder-decoder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ...models.seq2seq import Seq2Seq
from .explained import Entered, Explained, Tokenizer, check_length, likeliest_pieces, tokens_of, without_positions
from .sites import Place, record_mixers, sites_of

PARTS = ("encoder", "decoder", "cross")


def explain_translation(model: Seq2Seq, words: Tokenizer, text: str, name: str) -> Explained:
    """Let a model translate a text greedily, and collect what happens on the way."""
    source = source_tokens(model, words, text)
    written = _write(model, source)
    target = source.new_tensor([[model.config.start, *written[:-1]]])
    with record_mixers(list(places_of(model))) as calls:
        logits = model(source, target)[0]
    loss = partial(_loss, model, source, target, written)
    unordered, unordered_loss = None, None
    if model.positions is not None or model.encoder.positions is not None:
        with without_positions(model, model.encoder):
            unordered, unordered_loss = words.decode(_write(model, source)), loss()
    return Explained(
        name=name,
        kind="seq2seq",
        text=text,
        written=words.decode(written),
        source=_embed_tokens(model, words, source, model.encoder.positions),
        target=_embed_tokens(model, words, target, model.positions),
        sites=sorted(sites_of(calls, loss), key=lambda site: (PARTS.index(site.part), site.layer)),
        choices=likeliest_pieces(words, logits.softmax(-1)),
        unordered=unordered,
        unordered_loss=unordered_loss,
        loss=loss(),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def source_tokens(model: Seq2Seq, words: Tokenizer, text: str) -> Tensor:
    """Return a text as the model reads it, (1, S), with the end behind it."""
    ids = tokens_of(words, text, "The ball is blue")
    check_length(ids, min(model.config.max_len, model.max_source or model.config.max_len), end=True)
    return torch.tensor([[*ids, model.config.end]], device=model.embed.weight.device)


def places_of(model: Seq2Seq) -> Iterator[Place]:
    """Yield the mixers of a model in the order of the page."""
    specs = model.config.encoder_specs(), model.config.specs(), model.config.cross_specs()
    modules = (
        [block.mixer for block in model.encoder.blocks],
        [block.mixer for block in model.blocks],
        [block.cross for block in model.blocks],
    )
    for part, named, those in zip(PARTS, specs, modules, strict=True):
        for layer, (spec, mixer) in enumerate(zip(named, those, strict=True)):
            yield Place(part, layer, spec["name"], mixer)


def _write(model: Seq2Seq, source: Tensor) -> list[int]:
    """Return the tokens that the model writes, up to and with the end unless there is no room for it."""
    room = min(2 * source.shape[1] + 10, model.config.max_len, model.max_len or model.config.max_len)
    written = model.generate(source, room)[0].tolist()
    end = model.config.end
    return written[: written.index(end) + 1] if end in written else written


def _loss(model: Seq2Seq, source: Tensor, target: Tensor, written: list[int]) -> float:
    logits = model(source, target)[0]
    return float(nn.functional.cross_entropy(logits, source.new_tensor(written)))


def _embed_tokens(model: Seq2Seq, words: Tokenizer, tokens: Tensor, positions: nn.Module | None) -> Entered:
    ids = tokens[0].tolist()
    at = torch.arange(len(ids), device=tokens.device)[None]
    embedded = model.embed(tokens)[0] * model.config.embed_scale
    return Entered(words.pieces(ids), ids, embedded, None if positions is None else positions(at)[0].to(embedded.dtype))
