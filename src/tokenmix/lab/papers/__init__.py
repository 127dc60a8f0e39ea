"""The ledger: what the papers claim, as printed, and what is found here, with a verdict for each number.

Each source is a data file in ``sources``.
"""

from __future__ import annotations

from ...errors import MixerError
from ...system.config import nearest
from .claim import (
    NOT_BUILT,
    STATED,
    UNTESTABLE,
    VERDICTS,
    Claim,
    Number,
    Paper,
    Trial,
    Value,
    agrees,
    write_value,
)
from .dotted import locate_code
from .load import read_papers
from .ours import Outcome, compute_values, count_verdicts, decide_trial, measured_elsewhere, outcomes, recorded_values

__all__ = [
    "Claim",
    "NOT_BUILT",
    "Number",
    "Outcome",
    "PAPERS",
    "Paper",
    "STATED",
    "Trial",
    "UNTESTABLE",
    "VERDICTS",
    "Value",
    "agrees",
    "compute_values",
    "count_verdicts",
    "decide_trial",
    "find_paper",
    "locate_code",
    "measured_elsewhere",
    "outcomes",
    "recorded_values",
    "write_value",
]

PAPERS = read_papers()


def find_paper(key: str) -> Paper:
    """Return the source called ``key``; a misspelt key is refused with the nearest ones."""
    if key not in PAPERS:
        raise MixerError(f"there is no paper {key!r}; {nearest(key, PAPERS)}.")
    return PAPERS[key]
