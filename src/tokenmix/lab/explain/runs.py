"""Runs as the page needs them: the model and what makes tokens of a text for it, and a refusal of other kinds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import MixerError
from ...system.text import named_apart
from ..data.characters import CHARACTER_TASKS
from ..data.subwords import END, START, Subwords
from ..train import load_run
from ..train.label_task import join_texts
from ..train.registry import TASKS
from ..train.subword_task import TOKENIZER, read_tokenizer
from ..train.tasks import task_of
from .characters import Bytes, Characters
from .collect import explain
from .explained import Explained, Tokenizer

KINDS = {"seq2seq": "an encoder-decoder", "lm": "a language model", "encoder": "a text encoder"}
"""The kinds of models that can be explained."""


def explain_runs(runs: list[Path], text: str) -> list[Explained]:
    """Let the models of runs read a text, and collect what happens on the way.

    Raises:
        MixerError: if a run is of a kind that cannot be explained, if the runs are of different kinds, or if a model
            cannot read the text.
    """
    if not runs:
        raise MixerError("look sentence: no run was given; give at least one run directory.")
    if not text.strip():
        raise MixerError("look sentence: the text is empty; give one, such as --text 'The ball is blue'.")
    return [explain(*open_explainable(run), text, name) for run, name in zip(runs, named_apart(runs), strict=True)]


def open_explainable(run: Path) -> tuple[nn.Module, Tokenizer]:
    """Load the model of a run and its tokenizer.

    Raises:
        MixerError: if the model is of another kind than ``KINDS``, or its tokens are no text.
    """
    model, config = load_run(run)
    kind, saved = config.model.kind, run / TOKENIZER
    if kind not in KINDS:
        known = ", ".join(f"{name!r} ({what})" for name, what in KINDS.items())
        raise MixerError(
            f"look sentence: {run} holds a model of kind {kind!r}; look sentence takes one of kind {known}."
        )
    if saved.is_file():
        task = task_of(config)
        starts, ends = task.framed
        return model, Framed(run, ends=ends, labels=task.label_names(run)) if starts else read_tokenizer(run)
    return model, _characters(run, config.data)


class Framed(Subwords):
    """The subwords of a run on documents or labelled texts, with what begins and ends each text that its model read.

    Args:
        ends: whether a text is ended too.
        labels: the names of the classes of a classifier, which reads one text or two.
    """

    framing = (START, END)

    def __init__(self, run: Path, *, ends: bool, labels: Sequence[str] = ()):
        super().__init__(read_tokenizer(run).json, str(run / TOKENIZER))
        self.ends, self.labels = ends, labels

    def encode(self, text: str) -> list[int]:
        if self.labels:  # a tab stands between two texts
            parts = [super(Framed, self).encode(part.strip()) for part in text.split("\t")]
            return join_texts(parts, sum(map(len, parts)) + 1 + len(parts))
        return [START, *super().encode(text), *([END] if self.ends else [])]


def _characters(run: Path, data: Any) -> Tokenizer:
    """Return the tokenizer of a run without a ``tokenizer.json``."""
    tokens = TASKS[data.kind][0].tokens
    if tokens == "bytes":
        return Bytes()
    if tokens == "characters":
        if data.task in CHARACTER_TASKS:
            return Characters()
        raise MixerError(
            f"look sentence: {run} was trained on {data.task!r}, whose tokens are numbers, not text; give a run on "
            + f"text, on pairs of texts, or on one of {', '.join(CHARACTER_TASKS)}."
        )
    raise MixerError(f"look sentence: {run} has no {TOKENIZER}, without which its {data.kind} cannot be read as text.")
