"""The configs of data: text, documents, labelled texts, pairs of texts, images, and sequences that are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...errors import MixerError
from ...system.config import Json
from ..data.augment import Augment
from ..data.bounds import MAX_PIXELS
from ..data.subwords import END, START
from ..data.synthetic import Synthetic
from .class_losses import BALANCED, check_class_loss


@dataclass(frozen=True)
class DataConfig(Json):
    """The corpus of a language model.

    Args:
        source: "stdlib" (the Python sources on this machine, the default), "enwik8", or the path of a text file or
            folder.
        path: local copy of enwik8 (raw, .gz or .zip); None: downloaded. Only allowed with ``source="enwik8"``.
        split: proportions of train, validation and test, such as [90, 5, 5]; None: 90/5/5. enwik8 always has its
            official 90M/5M/5M bytes.
        seq_len: bytes per training sequence, from 1 to the model's ``max_len``.
        max_unpacked: bytes that an archive may unpack to, at least 1; None: 64 MiB or 100 times the archive's size,
            whichever is more.
    """

    source: str = "stdlib"
    path: str | None = None
    split: tuple[float, ...] | None = None
    seq_len: int = 256
    max_unpacked: int | None = None
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class ImageDataConfig(Json):
    """The images of a classifier, a density model or a diffusion transformer.

    Args:
        source: name of an image set (default "digits") or path of a folder, .npz, .zip or .tar file.
        path: local copy of a named set; None: downloaded, unless the set comes with a library (digits).
        valid: share of the training images held out for validation (a fraction below 1) or their number (1 or more);
            None: 0.1 where the set has no validation split of its own. With ``long_tail`` also 0: nothing is held out,
            as in the papers, and validation is on the test split.
        long_tail: imbalance factor, 1 or more. Of the training images, class c of C keeps
            n * long_tail^(-c / (C - 1)), so that the last one has n / long_tail; 1: as many of each. None: all images.
        per_class: the n of ``long_tail``, at least 1; None: as many as the classes have.
        shrink: factor by which height and width are divided, at least 1: each square of shrink x shrink pixels becomes
            one, their mean, rounded. Height and width must be multiples of it. 1: images as they are.
        loss: loss of a classifier: "cross_entropy", "balanced_cross_entropy", "bce", "class_balanced_bce" or
            "balanced_bce"; see ``train.ClassLoss``.
        loss_tau: scale of the bias of the balanced losses, 0 or more.
        augment: what happens to training images (see ``Augment``), by default nothing. A density model takes ``flip``,
            ``shift`` and ``repeats`` only; a diffusion transformer all but ``mixup``, ``cutmix``, ``erasing`` and
            ``randaugment``.
        smoothing: label smoothing, in [0, 1); 0: none.
        mean: mean of each channel, for pixels in 0..1, subtracted from them; None: that of ImageNet for colour images,
            0.5 for grey ones and for diffusion transformers.
        std: standard deviation of each channel, above 0, by which pixels are then divided; None: as for ``mean``.
        skip_bad_files: leave out files that cannot be read, with a warning, instead of refusing the set.
        layout: "classes": the first folders are classes, whatever their names; "splits": they are splits, and others
            are left out; None: told by the names, and refused where these can be understood in two ways.
        max_unpacked: bytes that an archive may unpack to, at least 1; None: 64 MiB or 100 times the archive's size,
            whichever is more.
        max_pixels: pixels that an image file may have, at least 1; default 89,478,485, where Pillow begins to warn.
    """

    source: str = "digits"
    path: str | None = None
    valid: float | None = None
    long_tail: float | None = None
    per_class: int | None = None
    shrink: int = 1
    loss: str = "cross_entropy"
    loss_tau: float = 1.0
    augment: Augment = field(default_factory=Augment)
    smoothing: float = 0.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    skip_bad_files: bool = False
    layout: str | None = None
    max_unpacked: int | None = None
    max_pixels: int = MAX_PIXELS
    kind: ClassVar[str] = "images"


@dataclass(frozen=True)
class SyntheticDataConfig(Json):
    """Sequences for a language model that are drawn while it trains, and two sets that are held out.

    Args:
        task: "recall" (multi-query associative recall, see ``data.recall_batch``, the default), or one of
            ``data.CHARACTER_TASKS``: "addition", "multiplication", "sort", "copy", "reverse", "parity",
            "selective_copy", "passkey".
        seq_len: tokens per sequence of "recall", and the most of the other tasks, from 1 to the model's ``max_len``.
        pairs: pairs of key and value in a sequence of "recall", at least 1.
        shortest: smallest size of the other tasks (digits, symbols, numbers), at least 1.
        longest: largest size in training; ``tokenmix eval --lengths`` goes beyond.
        pad: "addition" and "multiplication": whether numbers are padded with zeros to one length.
        symbols: "copy", "reverse" and "selective_copy": number of different symbols, at least 2.
        examples: number of sequences that training goes through again and again, at least 1 and kept in memory; None:
            every batch is drawn anew.
        vocab: number of tokens in the vocabulary, at most the model's; None: the model's.
        held_out: sequences of the validation split, and of the test split, at least 1.
    """

    task: str = "recall"
    seq_len: int = 64
    pairs: int = 8
    shortest: int = 1
    longest: int = 8
    pad: bool = False
    symbols: int = 10
    examples: int | None = None
    vocab: int | None = None
    held_out: int = 512
    kind: ClassVar[str] = "synthetic"

    def sequences(self, vocab: int) -> Synthetic:
        """Return the sequences for a model with this vocabulary.

        Raises:
            MixerError: for an unknown task, or sizes that do not fit it.
        """
        try:
            return Synthetic(
                self.task,
                seq_len=self.seq_len,
                vocab=vocab if self.vocab is None else self.vocab,
                pairs=self.pairs,
                shortest=self.shortest,
                longest=self.longest,
                pad=self.pad,
                symbols=self.symbols,
                examples=self.examples,
            )
        except MixerError as why:
            raise MixerError(f"config: data: {why}") from None


@dataclass(frozen=True)
class PairDataConfig(Json):
    """Pairs of texts for an encoder-decoder.

    Args:
        source: a name in ``data.PARALLEL_SETS`` ("grammar", "docstrings"), a folder, a table, a file of dialogues or of
            sources; see ``data.open_parallel``. None: to be given (``--data``).
        path: where that folder, table or file lies, if ``source`` is only its name, as in the plan of a sweep.
        target: file with one target per line, where ``source`` is a file with one source per line.
        languages: endings of a folder's files, or columns of a table: source, then target. None: those there are, if
            they are two.
        version: what follows the split in the names of a folder's tables or dialogues, such as "self_original"; None:
            there is one file for each split.
        split: proportions of train, validation and test of pairs that are not split yet; None: 90/5/5.
        tokenizer: path of a ready ``tokenizer.json``; None: byte-level BPE of ``model.vocab`` tokens is trained on the
            training pairs. The run keeps a copy either way.
        max_tokens: most tokens of a source, and of a target, with the end, from 2 to the model's ``max_len``. Longer
            pairs are left out in training, and cut in evaluation. Of a dialogue, what fits is read: the last turn, the
            persona sentences, and as many turns before it.
        cut_sources: whether longer sources are cut in training too; pairs with a longer target are left out.
        batch_tokens: most tokens in a batch, of sources and targets together with their padding; None: no limit but
            ``train.batch_size`` pairs.
        smoothing: label smoothing in training, in [0, 1); 0: none.
        metrics: what is computed of the texts that the model writes: "bleu", "chrf", "rouge".
    """

    source: str | None = None
    path: str | None = None
    target: str | None = None
    languages: tuple[str, ...] | None = None
    version: str | None = None
    split: tuple[float, ...] | None = None
    tokenizer: str | None = None
    max_tokens: int = 64
    cut_sources: bool = False
    batch_tokens: int | None = None
    smoothing: float = 0.1
    metrics: tuple[str, ...] = ("bleu", "chrf")
    kind: ClassVar[str] = "pairs"


@dataclass(frozen=True)
class DocumentDataConfig(Json):
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


@dataclass(frozen=True)
class LabelDataConfig(Json):
    """Labelled texts, or labelled pairs of texts, for an encoder with classes.

    Args:
        source: a name in ``data.LABELLED_SETS`` ("docstring_match", the default), a table, or a folder with a table for
            each split; see ``data.open_labelled``.
        path: where that table or folder lies, if ``source`` is only its name, as in the plan of a sweep.
        columns: one column of texts, or two for pairs; None: "sentence", "text", "premise" and "hypothesis", and so on,
            as the table has them.
        label: column of the labels.
        split: proportions of train, validation and test of rows that are not split yet; None: 90/5/5.
        tokenizer: path of a ready ``tokenizer.json``; None: that of the run in ``train.init``, if it has one, else
            byte-level BPE of ``model.vocab`` tokens is trained on the training split. The run keeps a copy either way.
        max_tokens: most tokens of a row with its start and ends, from 4 to the model's ``max_len``. Longer texts are
            cut; of a pair, the longer text first.
        batch_tokens: most tokens in a batch, with padding; None: no limit but ``train.batch_size`` rows.
    """

    source: str = "docstring_match"
    path: str | None = None
    columns: tuple[str, ...] | None = None
    label: str = "label"
    split: tuple[float, ...] | None = None
    tokenizer: str | None = None
    max_tokens: int = 128
    batch_tokens: int | None = None
    kind: ClassVar[str] = "labels"


METRICS = ("bleu", "chrf", "rouge")


def check_subwords(data: PairDataConfig | DocumentDataConfig | LabelDataConfig, model: Any, least: int) -> None:
    """Refuse sizes of texts in subwords that are out of range; ``least`` is the shortest ``max_tokens``."""
    if not least <= data.max_tokens <= model.max_len:
        raise MixerError(
            f"config: data.max_tokens must be in {least}..model.max_len={model.max_len}, got {data.max_tokens}."
        )
    if data.batch_tokens is not None and data.batch_tokens < 4:
        raise MixerError(f"config: data.batch_tokens must be at least 4, got {data.batch_tokens}.")
    ends = getattr(model, "start", START), getattr(model, "end", END)
    if ends != (START, END):
        raise MixerError(
            f"config: tokenizers start a text with token {START} and end it with token {END}; model.start and "
            + f"model.end must be these, got {ends[0]} and {ends[1]}."
        )


def check_documents(data: DocumentDataConfig, model: Any) -> None:
    """Refuse options of documents that are out of range."""
    check_subwords(data, model, 3)
    if getattr(model, "classes", 0):
        raise MixerError(
            f"config: an encoder with model.classes={model.classes} is trained on data of kind 'labels'; documents are "
            + "for one that predicts tokens, classes=0."
        )
    if data.packed and (data.batch_tokens is not None or model.kind == "seq2seq"):
        why = "an encoder-decoder" if model.kind == "seq2seq" else f"data.batch_tokens={data.batch_tokens}"
        raise MixerError(
            f"config: data.packed fills train.batch_size rows of data.max_tokens, which {why} does not take; "
            + "choose one of the two."
        )
    if not 0 < data.rate < 1:
        raise MixerError(f"config: data.rate must be in (0, 1), got {data.rate}.")
    if data.span < 1:
        raise MixerError(f"config: data.span must be at least 1, got {data.span}.")


def check_labels(data: LabelDataConfig, model: Any) -> None:
    """Refuse options of labelled texts that are out of range."""
    check_subwords(data, model, 4)
    if not model.classes:
        raise MixerError(
            "config: labelled texts need model.classes; give their number, or --data, which determines it. An encoder "
            + "without classes is trained on data of kind 'documents'."
        )


def check_pairs(data: PairDataConfig, model: Any) -> None:
    """Refuse options of pairs that are out of range."""
    check_subwords(data, model, 2)
    if not 0 <= data.smoothing < 1:
        raise MixerError(f"config: data.smoothing must be in [0, 1), got {data.smoothing}.")
    for name in data.metrics:
        if name not in METRICS:
            raise MixerError(f"config: data.metrics has no {name!r}; choose among {', '.join(METRICS)}.")


def check_synthetic(data: SyntheticDataConfig, model: Any) -> None:
    """Refuse sequences that a model cannot read or that cannot be drawn."""
    if data.held_out < 1:
        raise MixerError(f"config: data.held_out must be positive, got {data.held_out}.")
    if data.vocab is not None and data.vocab > model.vocab:
        raise MixerError(f"config: data.vocab must be at most model.vocab={model.vocab}, got {data.vocab}.")
    data.sequences(model.vocab)


def check_images(data: ImageDataConfig, model: Any) -> None:
    """Refuse options of images that are out of range."""
    if not 0 <= data.smoothing < 1:
        raise MixerError(f"config: data.smoothing must be in [0, 1), got {data.smoothing}.")
    if data.valid is not None and not (data.valid > 0 or (data.valid == 0 and data.long_tail is not None)):
        raise MixerError(f"config: data.valid must be a positive fraction or number of images, got {data.valid}.")
    if data.long_tail is not None and not 1 <= data.long_tail < math.inf:
        raise MixerError(
            "config: data.long_tail is the images of the largest class over those of the smallest, at least 1 (1: as "
            + f"many of each), got {data.long_tail}."
        )
    if data.shrink < 1:
        raise MixerError(
            f"config: data.shrink must be at least 1, the side of the squares of pixels averaged, got {data.shrink}."
        )
    if data.per_class is not None and (data.long_tail is None or data.per_class < 1):
        raise MixerError(
            "config: data.per_class is the largest class of data.long_tail, at least 1; got "
            + f"data.per_class={data.per_class} with data.long_tail={data.long_tail}; data.long_tail=1 keeps as many "
            + "images of each class."
        )
    _check_loss(data, model)


def _check_loss(data: ImageDataConfig, model: Any) -> None:
    """Refuse a loss, or an option of it, that the model is not trained with."""
    check_class_loss(data.loss)
    if model.kind == "mae" and (
        data.loss != "cross_entropy" or data.smoothing or data.augment.mixup or data.augment.cutmix
    ):
        raise MixerError(
            "config: a masked autoencoder has no labels; leave out data.loss, data.smoothing, data.augment.mixup and "
            + f"data.augment.cutmix, got {data.loss!r}, {data.smoothing}, {data.augment.mixup}, {data.augment.cutmix}."
        )
    if model.kind == "dit":
        _check_flow(data)
    if model.kind == "image_density" and data.loss != "cross_entropy":
        raise MixerError(
            f"config: data.loss={data.loss!r} is for classifiers; a model of kind 'image_density' has cross_entropy."
        )
    if not 0 <= data.loss_tau < math.inf:
        raise MixerError(f"config: data.loss_tau must be finite and >= 0, got {data.loss_tau}.")
    if data.loss_tau != 1 and data.loss not in BALANCED:
        raise MixerError(
            f"config: data.loss_tau={data.loss_tau} belongs to data.loss {' or '.join(map(repr, BALANCED))}, got "
            + f"{data.loss!r}."
        )


def _check_flow(data: ImageDataConfig) -> None:
    """Refuse what belongs to classifiers, and what would change the images that a diffusion transformer learns."""
    how = data.augment
    given = {"data.loss": data.loss != "cross_entropy", "data.smoothing": data.smoothing}
    given |= {f"data.augment.{name}": getattr(how, name) for name in ("mixup", "cutmix", "erasing", "randaugment")}
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise MixerError(
            f"config: a diffusion transformer learns images as they are and has one loss; leave out {', '.join(wrong)}."
        )
