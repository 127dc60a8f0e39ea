"""Values of examples/transhuman at the paper's sizes, as its benchmark recorded them: no wheel holds the example."""

from __future__ import annotations

import json

from ...errors import MixerError
from ...types import Record
from .claim import mark_stated
from .ours import RESULTS


def _recorded() -> Record:
    file = RESULTS / "transhuman_small.json"
    if not file.is_file():
        raise MixerError("papers: values of TransHuman are recorded in a checkout of the project only.")
    found: Record = json.loads(file.read_text())
    return found


@mark_stated
def transhuman_size(form: str) -> str:
    """Return sizes of the example's config of the paper, by their names in a format."""
    return form.format(**_recorded()["paper"])


def transhuman_point_features() -> int:
    """Return the features of a point that the built model reads: those of a token and of a place."""
    return int(_recorded()["point_features"])


def transhuman_parameters() -> float:
    """Return the millions of parameters of the built model."""
    return float(sum(_recorded()["counts"].values()) / 1e6)
