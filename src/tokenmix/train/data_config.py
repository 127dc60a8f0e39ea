"""The configs of data: text, images, and sequences that are drawn while a model trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..data.augment import Augment
from ..data.bounds import MAX_PIXELS
from ..data.synthetic import Synthetic
from ..errors import MixerError
from ..system.config import Json


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
        kind: "text"; tells this config from ``ImageDataConfig``.
    """

    source: str = "stdlib"
    path: str | None = None
    split: tuple[float, ...] | None = None
    seq_len: int = 256
    max_unpacked: int | None = None
    kind: str = "text"


@dataclass(frozen=True)
class ImageDataConfig(Json):
    """The images of a classifier or of a density model.

    Args:
        source: name of an image set (default "digits") or path of a folder, .npz or .zip file.
        path: local copy of a named set; None: downloaded, unless the set comes with a library (digits).
        valid: share of the training images held out for validation (a fraction below 1) or their number (1 or more);
            None: 0.1 where the set has no validation split of its own.
        augment: what happens to training images (see ``Augment``), by default nothing. A density model takes ``flip``,
            ``shift`` and ``repeats`` only.
        smoothing: label smoothing, in [0, 1); 0: none.
        mean: mean of each channel, for pixels in 0..1, subtracted from them; None: that of ImageNet for colour images,
            0.5 for grey ones.
        std: standard deviation of each channel, above 0, by which pixels are then divided; None: as for ``mean``.
        skip_bad_files: leave out files that cannot be read, with a warning, instead of refusing the set.
        max_unpacked: bytes that an archive may unpack to, at least 1; None: 64 MiB or 100 times the archive's size,
            whichever is more.
        max_pixels: pixels that an image file may have, at least 1; default 89,478,485, where Pillow begins to warn.
        kind: "images"; tells this config from ``DataConfig``.
    """

    source: str = "digits"
    path: str | None = None
    valid: float | None = None
    augment: Augment = field(default_factory=Augment)
    smoothing: float = 0.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    skip_bad_files: bool = False
    max_unpacked: int | None = None
    max_pixels: int = MAX_PIXELS
    kind: str = "images"


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
        vocab: number of tokens in the vocabulary, at most the model's; None: the model's.
        held_out: sequences of the validation split, and of the test split, at least 1.
        kind: "synthetic"; tells this config from ``DataConfig``.
    """

    task: str = "recall"
    seq_len: int = 64
    pairs: int = 8
    shortest: int = 1
    longest: int = 8
    pad: bool = False
    symbols: int = 10
    vocab: int | None = None
    held_out: int = 512
    kind: str = "synthetic"

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
            )
        except MixerError as why:
            raise MixerError(f"config: data: {why}") from None


def check_synthetic(data: SyntheticDataConfig, model: Any) -> None:
    """Refuse sequences that a model cannot read or that cannot be drawn."""
    if data.held_out < 1:
        raise MixerError(f"config: data.held_out must be positive, got {data.held_out}.")
    if data.vocab is not None and data.vocab > model.vocab:
        raise MixerError(f"config: data.vocab must be at most model.vocab={model.vocab}, got {data.vocab}.")
    data.sequences(model.vocab)


def check_images(data: ImageDataConfig) -> None:
    """Refuse options of images that are out of range."""
    if not 0 <= data.smoothing < 1:
        raise MixerError(f"config: data.smoothing must be in [0, 1), got {data.smoothing}.")
    if data.valid is not None and data.valid <= 0:
        raise MixerError(f"config: data.valid must be a positive fraction or number of images, got {data.valid}.")
