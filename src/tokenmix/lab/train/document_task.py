"""Documents in subwords: the next subword, masked subwords, or replaced spans."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models import LM, Seq2Seq, evaluation_mode
from ...types import Options
from ..data.documents import DOCUMENT_SETS, open_documents
from ..data.masking import corrupt_spans, mask_tokens
from ..data.packing import PackedRows
from ..data.pair_sampler import IGNORED, LengthBuckets, PairBatch, pad_rows, pair_batch
from ..data.rows import Rows
from ..data.sampler import MASK as ALL_BITS
from ..data.sampler import mix64
from ..data.subwords import END, PAD, SPECIAL, START, Subwords
from .config import RunConfig
from .registry import TaskData
from .subword_task import SubwordTask, check_source, check_subwords, read_tokenizer, token_count, token_loss, token_nats
from .task import Inputs, groups_of, record_seconds

SHOWN, LIKELY = 8, 3
"""Texts of the validation split that a run writes at each evaluation, and guesses at each of their masks."""


@dataclass(frozen=True)
class DocumentDataConfig(TaskData):
    """Documents, cut into subwords. What is learnt depends on the model.

    A language model predicts the next subword; an encoder without classes the subwords that were masked; an
    encoder-decoder the spans that were replaced by sentinels.

    Args:
        source: "stdlib" (files of Python's standard library, the default), a folder, a table or a file; see
            ``data.open_documents``.
        path: where that folder, table or file lies, if ``source`` is only its name, as in the plan of a sweep.
        column: column of a table that holds the text; None: "text", "sentence", "document", or the only one.
        split: proportions of train, validation and test of documents that are not split yet; None: 90/5/5.
        tokenizer: path of a ready ``tokenizer.json``; None: that of the run in ``train.init``, if it has one, else
            byte-level BPE of ``model.vocab`` tokens is trained on the training split. The run keeps a copy either way.
        max_tokens: most tokens of a text with its start and end, from 3 to the model's ``max_len``. Longer documents
            are cut into several texts.
        batch_tokens: most tokens in a batch, with padding; None: no limit but ``train.batch_size`` texts.
        packed: put several texts, each of which sees itself only, into each of ``train.batch_size`` rows of
            ``max_tokens`` in place of padding; not for encoder-decoders.
        rate: share of the tokens that is masked, or replaced by sentinels, in (0, 1).
        whole_words: mask all tokens of a word together.
        span: mean length of a span that a sentinel replaces, at least 1.
    """

    source: str = "stdlib"
    path: str | None = None
    column: str | None = None
    split: tuple[float, ...] | None = None
    tokenizer: str | None = None
    max_tokens: int = 128
    batch_tokens: int | None = None
    packed: bool = False
    rate: float = 0.15
    whole_words: bool = True
    span: float = 3.0
    kind: ClassVar[str] = "documents"


class PackedBatch(NamedTuple):
    """What a language model reads of rows that hold several texts.

    Attributes:
        tokens: (B, T), ``PAD`` after the last text of a row.
        starts: (B, T) bool, True where a text or the padding begins.
    """

    tokens: Tensor
    starts: Tensor


class MaskedBatch(NamedTuple):
    """What an encoder reads of texts, one in each row, padded on the right.

    Attributes:
        tokens: (B, T).
        key_mask: (B, T) bool, False at padding.
        chosen: (B, M) indices of the tokens to predict; 0 where a row has fewer.
    """

    tokens: Tensor
    key_mask: Tensor
    chosen: Tensor


class PackedMaskedBatch(NamedTuple):
    """What an encoder reads of rows that hold several texts; see ``PackedBatch`` and ``MaskedBatch``."""

    tokens: Tensor
    starts: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class DocumentScore:
    """The score of a model on ``texts`` documents.

    Attributes:
        cross_entropy: mean cross-entropy of a predicted token in nats.
        tokens: number of tokens that were predicted.
        accuracy: share of them that the model held most likely.
        bits_per_byte: of language models: cross-entropy of the documents by the bytes of their text.
    """

    cross_entropy: float
    tokens: int
    texts: int
    accuracy: float
    bits_per_byte: float | None = None
    seconds: float = 0.0

    def text(self) -> str:
        per_byte = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return (
            f"cross-entropy {self.cross_entropy:.4f}, perplexity {math.exp(min(self.cross_entropy, 700)):,.2f} per "
            + f"subword{per_byte}, {100 * self.accuracy:.2f} % right, {self.tokens:,} of them in {self.texts:,} texts"
        )


class DocumentTask(SubwordTask):
    """Train a model on documents, without labels."""

    config = DocumentDataConfig
    movable = ("source", "path", "tokenizer")
    sets = DOCUMENT_SETS
    scored = (
        *("data.source", "data.path", "data.split", "data.column", "data.rate", "data.whole_words", "data.span"),
        *("data.tokenizer", "data.max_tokens", "train.eval_texts"),
    )
    reads = ("eval_texts", "samples")
    reads_with: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {
        "train.samples": ("model.kind", ("lm",)),
        "data.rate": ("model.kind", ("encoder", "seq2seq")),
        "data.whole_words": ("model.kind", ("encoder",)),
        "data.span": ("model.kind", ("seq2seq",)),
    }
    packs: ClassVar[bool] = True
    """Whether several texts may stand in one row."""
    metric = "cross_entropy"
    options = ("max_texts",)

    @cached_property
    def pool(self) -> tuple[list[list[int]], PackedRows | LengthBuckets]:
        """The training texts as tokens, and which of them are in the batch of a step; only training needs them."""
        pieces = [piece for document in self.documents("train") for piece in document]
        lengths, data, loop = [len(piece) for piece in pieces], self.data, self.train
        if data.packed:
            return pieces, PackedRows(lengths, most=data.max_tokens, batch_size=loop.batch_size, seed=loop.seed)
        column = torch.tensor(lengths)[:, None]
        return pieces, LengthBuckets(column, batch_size=loop.batch_size, batch_tokens=data.batch_tokens, seed=loop.seed)

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse options of documents that are out of range."""
        data, model = cast(Any, config.data), cast(Any, config.model)
        check_subwords(data, model, 3)
        if getattr(model, "classes", 0):
            raise MixerError(
                f"config: an encoder with model.classes={model.classes} is trained on data of kind 'labels'; documents "
                + "are for one that predicts tokens, classes=0."
            )
        if data.packed and (data.batch_tokens is not None or not cls.packs):
            why = "an encoder-decoder" if not cls.packs else f"data.batch_tokens={data.batch_tokens}"
            raise MixerError(
                f"config: data.packed fills train.batch_size rows of data.max_tokens, which {why} does not take; "
                + "choose one of the two."
            )
        if not 0 < data.rate < 1:
            raise MixerError(f"config: data.rate must be in (0, 1), got {data.rate}.")
        if data.span < 1:
            raise MixerError(f"config: data.span must be at least 1, got {data.span}.")

    def open_text(self) -> Rows:
        data = self.data
        return open_documents(data.path or data.source, column=data.column, split=data.split)

    def texts(self) -> Iterable[str]:
        return (text for (text,) in self.text.split("train"))

    def documents(self, split: str, most: int | None = None) -> list[list[list[int]]]:
        """Return the first documents of a split as tokens.

        Each is cut into pieces of at most ``data.max_tokens``. A piece begins with ``START``, the last one of a
        document ends with ``END``.
        """
        found = self.subwords.encode_all([text for (text,) in self.text.split(split)[:most]])
        size, documents = self.data.max_tokens - 1, []
        for tokens in found:
            whole = [*tokens, END]
            documents.append([[START, *whole[at : at + size]] for at in range(0, len(whole), size)])
        return documents

    def units(self) -> int:
        """Return the mean number of tokens per step, without padding."""
        pieces, batches = self.pool
        return round(sum(map(len, pieces)) / len(batches))

    def batch(self, step: int) -> tuple[Inputs, Tensor]:
        generator = torch.Generator().manual_seed(mix64(self.train.seed ^ mix64(step)) & ALL_BITS)
        pieces, batches = self.pool
        if isinstance(batches, PackedRows):
            return self.packed_example([[pieces[i] for i in row] for row in batches.rows(step)], generator)
        return self.example([pieces[i] for i in batches.rows(step)], [generator])

    def example(self, pieces: list[list[int]], generators: list[torch.Generator]) -> tuple[Inputs, Tensor]:
        """Return inputs and targets of some pieces; one generator draws for all of them, or each for its own."""
        raise NotImplementedError

    def packed_example(self, rows: list[list[list[int]]], generator: torch.Generator) -> tuple[Inputs, Tensor]:
        """Return inputs and targets of rows that hold several pieces each."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return token_loss(outputs, targets)

    def count_targets(self, targets: Tensor) -> int:
        return token_count(targets)

    @record_seconds
    def evaluate(self, model: nn.Module, split: str, /, *, max_texts: int | None = None) -> DocumentScore:
        """Score the model on a split. What is hidden of a text depends on its place in the split only.

        Args:
            max_texts: score only the first documents; None: all.
        """
        documents = self.documents(split, max_texts)
        pieces = [piece for document in documents for piece in document]
        order = sorted(range(len(pieces)), key=lambda i: len(pieces[i]))
        nats, count, right = 0.0, 0, 0
        batches = (
            self.example(
                [pieces[i] for i in group], [torch.Generator().manual_seed(mix64(i) & ALL_BITS) for i in group]
            )
            for group in groups_of(order, self.train.eval_batch)
        )
        for logits, wanted in self.answers(model, batches):
            targets = wanted.to(logits.device)
            nats += token_nats(logits, targets)
            count += token_count(targets)
            right += int((logits.argmax(-1) == targets).sum())
        if not count:
            raise MixerError(f"eval: the split {split} of {self.text.name} holds nothing to predict.")
        size = sum(len(text.encode()) for (text,) in self.text.split(split)[:max_texts])
        per_byte = nats / math.log(2) / size if self.writes == "write" else None
        return DocumentScore(nats / count, count, len(documents), right / count, per_byte)

    def eval_options(self) -> Options:
        return {"max_texts": self.train.eval_texts}


class NextTask(DocumentTask):
    """Predict the next subword, with a language model."""

    models = ("lm",)
    writes, framed = "write", (True, False)

    def example(self, pieces: list[list[int]], generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
        tokens, mask = pad_rows(pieces)
        return tokens[:, :-1], tokens[:, 1:].masked_fill(~mask[:, 1:], IGNORED)

    def packed_example(self, rows: list[list[list[int]]], generator: torch.Generator) -> tuple[PackedBatch, Tensor]:
        tokens, starts = packed_rows(rows, self.data.max_tokens)
        nothing = starts | (tokens == PAD)  # no token predicts the start of the next text, or padding
        return PackedBatch(tokens[:, :-1], starts[:, :-1]), tokens[:, 1:].masked_fill(nothing[:, 1:], IGNORED)

    @classmethod
    def streams(cls, config: RunConfig) -> int:
        return cast(DocumentDataConfig, config.data).max_tokens

    @classmethod
    def continue_text(
        cls, config: RunConfig, run: Path, model: LM, prompt: bytes, n: int | None, **sampling: Any
    ) -> bytes:
        if n is not None:
            raise MixerError(f"sample: the model of {run} counts subwords, not bytes; leave the number of bytes out.")
        most, text = cast(DocumentDataConfig, config.data).max_tokens, prompt.decode(errors="replace")
        return continue_text(model, read_tokenizer(run), text, most, **sampling).encode()

    def sample(self, model: LM, folder: Path, step: int) -> None:
        """Let the model begin a text."""
        if not self.train.samples:
            return
        texts = [
            continue_text(model, self.subwords, "", self.data.max_tokens, seed=i) for i in range(self.train.samples)
        ]
        self.write_sample(folder, step, "\n\n".join(texts))


class MaskedTask(DocumentTask):
    """Predict masked subwords, with an encoder."""

    models = ("encoder",)
    writes, framed = "fill", (True, True)

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        self.starts_word = self.subwords.starts_word() if self.data.whole_words else None

    def example(self, pieces: list[list[int]], generators: list[torch.Generator]) -> tuple[MaskedBatch, Tensor]:
        tokens, mask = pad_rows(pieces)
        if len(generators) == 1:
            draws = torch.rand((3, *tokens.shape), generator=generators[0])
        else:
            draws = torch.zeros(3, *tokens.shape)
            for i, (piece, each) in enumerate(zip(pieces, generators, strict=True)):
                draws[:, i, : len(piece)] = torch.rand(3, len(piece), generator=each)
        hidden, targets = self.mask_batch(tokens, draws)
        chosen, said = chosen_of(targets)
        return MaskedBatch(hidden, mask, chosen), said

    def packed_example(
        self, rows: list[list[list[int]]], generator: torch.Generator
    ) -> tuple[PackedMaskedBatch, Tensor]:
        tokens, starts = packed_rows(rows, self.data.max_tokens)
        hidden, targets = self.mask_batch(tokens, torch.rand((3, *tokens.shape), generator=generator))
        chosen, said = chosen_of(targets)
        return PackedMaskedBatch(hidden, starts, chosen), said

    def mask_batch(self, tokens: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Hide tokens by the options of the config; see ``mask_tokens``."""
        data = self.data
        return mask_tokens(
            tokens,
            tokens >= len(SPECIAL),
            draws,
            vocab=self.subwords.vocab,
            rate=data.rate,
            starts_word=self.starts_word,
        )

    def sample(self, model: nn.Module, folder: Path, step: int) -> None:
        """Write what the model makes of masks in the first texts of the validation split."""
        shown = []
        for i, document in enumerate(self.documents("valid", SHOWN)):
            batch, targets = self.example(document[:1], [torch.Generator().manual_seed(i)])
            words = self.subwords.pieces(batch.tokens[0].tolist())
            guesses = likely_subwords(model, batch.tokens, batch.chosen[0], self.subwords, LIKELY)
            for at, target, guess in zip(batch.chosen[0].tolist(), targets[0].tolist(), guesses, strict=True):
                said = ", ".join(f"{word} {share:.2f}" for word, share in guess)
                words[at] += f"[{self.subwords.pieces([target])[0]}: {said}]"
            shown.append(" ".join(words[1:]))
        self.write_sample(folder, step, "\n\n".join(shown))


class SpanTask(DocumentTask):
    """Write the spans that sentinels stand for, with an encoder-decoder."""

    models = ("seq2seq",)
    writes = "translate"
    packs = False
    sentinels = 100

    def example(self, pieces: list[list[int]], generators: list[torch.Generator]) -> tuple[PairBatch, Tensor]:
        known, data, pairs = self.subwords.sentinels, self.data, []
        for i, piece in enumerate(pieces):
            each = generators[i % len(generators)]
            tokens = [token for token in piece if token not in (START, END)]
            pairs.append(corrupt_spans(tokens, each, sentinels=known, rate=data.rate, mean=data.span))
        sources, targets = zip(*pairs, strict=True)
        return pair_batch(list(sources), list(targets))

    @classmethod
    def translate_text(cls, config: RunConfig, run: Path, model: Seq2Seq, text: str, **sampling: Any) -> str:
        subwords, most = read_tokenizer(run), cast(DocumentDataConfig, config.data).max_tokens
        tokens = subwords.encode_marked(text)
        check_source(tokens, most)
        if not set(tokens) & set(subwords.sentinels):
            raise MixerError(
                "sample: the text must have a sentinel to fill in, such as <extra_0>; give it with --prompt."
            )
        source = torch.tensor([[*tokens, END]], device=next(model.parameters()).device)
        said: list[int] = model.generate(source, most, **sampling)[0].tolist()
        return subwords.decode_marked(said[: said.index(END)] if END in said else said)


def packed_rows(rows: list[list[list[int]]], length: int) -> tuple[Tensor, Tensor]:
    """Return rows of texts as tokens (B, length), ``PAD`` at their ends, and where a text or the padding begins."""
    tokens = torch.full((len(rows), length), PAD)
    starts = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = 0
        for piece in row:
            tokens[i, at : at + len(piece)] = torch.tensor(piece)
            starts[i, at] = True
            at += len(piece)
        starts[i, at : at + 1] = True
    return tokens, starts


def chosen_of(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return where targets (B, T) are not ``IGNORED``, (B, M), and the targets there; ``IGNORED`` in shorter rows."""
    wanted = targets != IGNORED
    most = max(int(wanted.sum(1).max()), 1)
    chosen = wanted.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    said = targets.gather(1, chosen)
    return chosen.masked_fill(said == IGNORED, 0), said


@torch.no_grad()
def likely_subwords(
    model: nn.Module, tokens: Tensor, places: Tensor, subwords: Subwords, n: int
) -> list[list[tuple[str, float]]]:
    """Return the n most likely subwords at some places of a text by an encoder, and their probabilities.

    Args:
        tokens: (1, T).
        places: (M,) indices.
    """
    device = next(model.parameters()).device
    with evaluation_mode(model):
        logits = model(tokens.to(device), chosen=places[None].to(device))[0].float()
    best = logits[:, : subwords.vocab].softmax(-1).topk(min(n, subwords.vocab))
    return [
        [(subwords.pieces([token])[0], share) for token, share in zip(row, shares, strict=True)]
        for row, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def continue_text(model: LM, subwords: Subwords, prompt: str, most: int, **sampling: Any) -> str:
    """Return the prompt and what a language model writes after it, up to the end of the text or ``most`` tokens."""
    tokens = [START, *(subwords.encode(prompt) if prompt.strip() else [])]
    if len(tokens) >= most:
        raise MixerError(f"sample: the prompt has {len(tokens) - 1} subwords; the model reads at most {most - 2}.")
    device = next(model.parameters()).device
    said = model.generate(torch.tensor([tokens], device=device), most - len(tokens), **sampling)[0].tolist()
    return subwords.decode(said[: said.index(END)] if END in said else said)
