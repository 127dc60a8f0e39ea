"""Labelled texts: classes of single texts and of pairs of texts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...types import Options, Record
from ..data.labelled import LABELLED_SETS, open_labelled
from ..data.pair_sampler import LengthBuckets, pad_rows
from ..data.rows import Rows
from ..data.subwords import END, START
from .config import RunConfig
from .registry import TaskData
from .rundir import RunDir
from .subword_task import SubwordTask, check_subwords, recorded_texts
from .task import Evaluate, groups_of, per_cent, record_seconds

LABELS = "labels.json"
FRAME = 5
"""Tokens around the characters of two texts: a start, and for each text the space before its first word and an end."""
READ: dict[str, tuple[Rows, list[str]]] = {}
"""The labelled texts that ``labels_of`` has read last, as a million rows take seconds: by config and state of files."""


@dataclass(frozen=True)
class LabelDataConfig(TaskData):
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


class TextBatch(NamedTuple):
    """What an encoder reads of texts, one in each row, padded on the right.

    Attributes:
        tokens: (B, T).
        key_mask: (B, T) bool, False at padding.
    """

    tokens: Tensor
    key_mask: Tensor


@dataclass(frozen=True)
class LabelScore:
    """The score of a classifier on ``texts`` texts, or pairs of them.

    Attributes:
        accuracy: share of them whose label is right.
        f1: F1 of each label, and of these the mean; 0 to 1.
        matthews: Matthews' correlation, -1 to 1; 0 is chance.
        cross_entropy: mean cross-entropy of the labels in nats.
    """

    accuracy: float
    f1: float
    matthews: float
    cross_entropy: float
    texts: int
    seconds: float = 0.0

    def text(self) -> str:
        return (
            f"{100 * self.accuracy:.2f} % right, F1 {100 * self.f1:.2f}, Matthews {self.matthews:.4f}, cross-entropy "
            + f"{self.cross_entropy:.4f}, {self.texts:,} texts"
        )


class Labels(NamedTuple):
    """What a run keeps of the data of its classifier.

    Attributes:
        labels: names of the classes, by number.
        texts: texts that are read together: 1, or 2 for a pair.
    """

    labels: list[str]
    texts: int


def read_labels(run: Path) -> Labels:
    """Load the labels that a run keeps.

    Raises:
        MixerError: if they cannot be read, or are not those that the run was trained with.
    """
    found, then = RunDir(run).read(LABELS), recorded_texts(run).get("labels")
    labels, texts = (found.get("labels"), found.get("texts")) if isinstance(found, dict) else (None, None)
    if not isinstance(labels, list) or texts not in (1, 2) or then not in (None, labels):
        was = "" if then is None else f": it was {', '.join(then[:20])}"
        raise MixerError(f"{run / LABELS} changed since the run began{was}; restore the old one.")
    return Labels(labels, texts)


class LabelTask(SubwordTask):
    """Train an encoder to tell the class of a text, or of a pair of texts."""

    config = LabelDataConfig
    models = ("encoder",)
    movable = ("source", "path", "tokenizer")
    writes, framed = "classify", (True, True)
    sets = LABELLED_SETS
    scored = (
        *("data.source", "data.path", "data.split", "data.columns", "data.label", "data.tokenizer", "data.max_tokens"),
        "train.eval_texts",
    )
    reads = ("eval_texts",)
    matches = True
    metric = "accuracy"
    higher = True
    options = ("max_texts",)
    outputs, places = "classes", 0

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        if len(self.labels) != self.model.classes:
            raise MixerError(
                f"config: {self.text.name} has {len(self.labels)} labels ({', '.join(self.labels[:20])}), but "
                + f"model.classes={self.model.classes}; set it to {len(self.labels)}, or give --data."
            )
        self.number = {label: i for i, label in enumerate(self.labels)}

    @cached_property
    def pool(self) -> tuple[list[list[int]], LengthBuckets]:
        """The training texts as tokens, and which of them are in the batch of a step; only training needs them."""
        tokens = self.tokens_of(self.text.split("train"))
        lengths = torch.tensor([len(row) for row in tokens])[:, None]
        loop = self.train
        return tokens, LengthBuckets(
            lengths, batch_size=loop.batch_size, batch_tokens=self.data.batch_tokens, seed=loop.seed
        )

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse options of labelled texts that are out of range."""
        data, model = cast(Any, config.data), cast(Any, config.model)
        check_subwords(data, model, 4)
        if not model.classes:
            raise MixerError(
                "config: labelled texts need model.classes; give their number, or --data, which determines it. An "
                + "encoder without classes is trained on data of kind 'documents'."
            )

    @classmethod
    def match(cls, config: RunConfig) -> RunConfig:
        return config.override({"model.classes": len(labels_of(config))})

    def open_text(self) -> Rows:
        rows, self.labels = open_texts(self.data)
        return rows

    def texts(self) -> Iterable[str]:
        return (text for row in self.text.split("train") for text in row[:-1])

    def files(self) -> dict[str, str]:
        known = Labels(self.labels, len(self.text.split("train")[0]) - 1)
        return {**super().files(), LABELS: json.dumps(known._asdict())}

    def same(self) -> Record:
        return {**super().same(), "labels": self.labels}

    def tokens_of(self, rows: list[tuple[str, ...]]) -> list[list[int]]:
        """Return the tokens of each row: its start, its first text and an end, its second text and an end."""
        parts = [self.subwords.encode_all([row[i] for row in rows]) for i in range(len(rows[0]) - 1)] if rows else []
        return [join_texts(list(texts), self.data.max_tokens) for texts in zip(*parts, strict=True)]

    def units(self) -> int:
        """Return the mean number of tokens per step, without padding."""
        tokens, buckets = self.pool
        return round(sum(map(len, tokens)) / len(buckets))

    def batch(self, step: int) -> tuple[TextBatch, Tensor]:
        tokens, buckets = self.pool
        chosen, rows = buckets.rows(step), self.text.split("train")
        return TextBatch(*pad_rows([tokens[i] for i in chosen])), self.targets([rows[i] for i in chosen])

    def targets(self, rows: list[tuple[str, ...]]) -> Tensor:
        """Return the number of each row's label."""
        return torch.tensor([self.number[row[-1]] for row in rows])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float(), targets)

    @record_seconds
    def evaluate(self, model: nn.Module, split: str, /, *, max_texts: int | None = None) -> LabelScore:
        """Score the model on a split.

        Args:
            max_texts: score only the first texts; None: all.
        """
        rows = self.text.split(split)[:max_texts]
        tokens = self.tokens_of(rows)
        order = sorted(range(len(rows)), key=lambda i: len(tokens[i]))
        logits = torch.empty(len(rows), len(self.labels), dtype=torch.float64)
        groups = groups_of(order, self.train.eval_batch)
        batches = ((TextBatch(*pad_rows([tokens[i] for i in group])), group) for group in groups)
        for found, group in self.answers(model, batches):
            logits[group] = found.double().cpu()
        wanted, said = self.targets(rows), logits.argmax(1)
        nats = float(F.cross_entropy(logits, wanted))
        return LabelScore(**agreement(wanted, said), cross_entropy=nats, texts=len(rows))

    @classmethod
    def score_test_split(cls, evaluate: Evaluate, test_bytes: int | None) -> Record:
        return per_cent(evaluate(), "accuracy")

    @classmethod
    def label_names(cls, run: Path) -> list[str]:
        return read_labels(run).labels

    def eval_options(self) -> Options:
        return {"max_texts": self.train.eval_texts}


def open_texts(data: LabelDataConfig) -> tuple[Rows, list[str]]:
    """Open the labelled texts of a config, and return their labels too; what ``labels_of`` has just read is taken."""
    kept = READ.pop(repr((data, _state(data))), None)
    READ.clear()
    return kept or open_labelled(
        data.path or data.source,
        columns=data.columns,
        label=data.label,
        split=data.split,
        room=data.max_tokens - FRAME,
    )


def labels_of(config: RunConfig) -> list[str]:
    """Return the labels of a config's data, whose rows are kept for the task that is opened next."""
    data = cast(LabelDataConfig, config.data)
    state, found = _state(data), open_texts(data)
    READ[repr((data, state))] = found
    return found[1]


def _state(data: LabelDataConfig) -> list[tuple[str, int, int, int]]:
    """Return size and times of the files of a config's data, by which a change is noticed."""
    path = Path(data.path or data.source).expanduser()
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    stats = [(str(file), file.stat()) for file in files if file.exists()]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]


def join_texts(texts: list[list[int]], most: int) -> list[int]:
    """Return one text or two as one row: ``START``, the texts, and ``END`` after each.

    More than ``most`` tokens in all are cut from the end of the text that is longer.
    """
    sizes, room = [len(text) for text in texts], most - 1 - len(texts)
    while sum(sizes) > room:
        longest = sizes.index(max(sizes))
        others = sum(sizes) - sizes[longest]
        next_longest = max((size for i, size in enumerate(sizes) if i != longest), default=0)
        sizes[longest] = max(room - others, min(next_longest, sizes[longest] - 1))
    return [START, *(token for text, size in zip(texts, sizes, strict=True) for token in [*text[:size], END])]


def agreement(wanted: Tensor, said: Tensor) -> dict[str, float]:
    """Return accuracy, mean F1 of the labels and Matthews' correlation, by scikit-learn."""
    try:
        from sklearn.metrics import f1_score, matthews_corrcoef
    except ImportError as why:
        raise MixerError(f"eval: F1 needs the extra 'text' ({why}): pip install 'tokenmix[text]'.") from None
    f1 = f1_score(wanted.numpy(), said.numpy(), average="macro", zero_division=0)
    return {
        "accuracy": float((wanted == said).double().mean()),
        "f1": float(f1),
        "matthews": float(matthews_corrcoef(wanted.numpy(), said.numpy())),
    }
