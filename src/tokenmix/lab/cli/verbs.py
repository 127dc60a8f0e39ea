"""The table of verbs: each name with its dataclass. Heavy imports wait until a verb runs."""

from __future__ import annotations

from typing import Any

from .advise import Advise
from .anatomy import AnatomyOf
from .bench import Bench
from .explain import Explain
from .library import Check, Doctor, ListAll, NewMixer
from .papers import ShowPapers
from .runs import Evaluate, Pictures, Report, Resume, Train
from .sample import Sample
from .sweep import Sweep
from .watch import Watch
from .weights import Convert, ExportHF, ExportONNX

VERBS: dict[str, type[Any]] = {
    "doctor": Doctor,
    "list": ListAll,
    "check": Check,
    "new-mixer": NewMixer,
    "paper": ShowPapers,
    "advise": Advise,
    "train": Train,
    "resume": Resume,
    "sweep": Sweep,
    "eval": Evaluate,
    "sample": Sample,
    "report": Report,
    "watch": Watch,
    "explain": Explain,
    "anatomy": AnatomyOf,
    "convert": Convert,
    "export-hf": ExportHF,
    "export-onnx": ExportONNX,
    "pictures": Pictures,
    "bench": Bench,
}

OLD_VERBS = {"papers": "paper"}
"""Verbs that were renamed, with the name that replaces each."""
