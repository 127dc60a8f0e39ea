"""The table of verbs: each name with its dataclass. Heavy imports wait until a verb runs."""

from __future__ import annotations

from .advise import Advise
from .bench import Bench
from .library import Check, Doctor, ListAll, NewMixer
from .look import Look
from .papers import ShowPapers
from .runs import Evaluate, Report, Resume, Train
from .sample import Sample
from .sweep import Sweep
from .weights import Convert, Export

VERBS: dict[str, type] = {
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
    "look": Look,
    "convert": Convert,
    "export": Export,
    "bench": Bench,
}
OTHER_VERBS = {
    "anatomy": "look tokens MODEL IMAGES",
    "benchmark": "bench",
    "compare": "report RUN",
    "evaluate": "eval RUN",
    "explain": "look sentence RUN --text TEXT",
    "export-hf": "export RUN OUT",
    "export-onnx": "export MODEL OUT.onnx",
    "generate": "sample RUN",
    "papers": "paper",
    "pictures": "look images MODEL IMAGE --out OUT",
    "watch": "report DIR --watch",
}
"""Verbs of earlier versions and of other tools, and what they are here."""
