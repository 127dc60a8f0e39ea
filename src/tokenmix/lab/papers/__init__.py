"""The ledger: what the papers claim, as printed, and what is found here, with a verdict for each number."""

from __future__ import annotations

from ...errors import MixerError
from ...system.config import nearest
from .abacus import PAPER as _abacus
from .aft import PAPER as _aft
from .claim import (
    NOT_BUILT,
    NOT_YET,
    STATED,
    TOO_LARGE,
    VERDICTS,
    Claim,
    Number,
    Paper,
    Trial,
    Value,
    agrees,
    located,
    written,
)
from .explained import PAPER as _explained
from .external import PAPER as _external
from .extrapolation import PAPER as _extrapolation
from .hydra import PAPER as _hydra
from .livt import PAPER as _livt
from .ours import Outcome, computed, decided, measured_elsewhere, outcomes, recorded, tried
from .pvt import PAPER as _pvt
from .registers import PAPER as _registers
from .survey import PAPER as _survey
from .synthesizer import PAPER as _synthesizer
from .transhuman import PAPER as _transhuman

__all__ = [
    "Claim",
    "NOT_BUILT",
    "NOT_YET",
    "Number",
    "Outcome",
    "PAPERS",
    "Paper",
    "STATED",
    "TOO_LARGE",
    "Trial",
    "VERDICTS",
    "Value",
    "agrees",
    "computed",
    "decided",
    "find_paper",
    "located",
    "measured_elsewhere",
    "outcomes",
    "recorded",
    "tried",
    "written",
]

PAPERS: dict[str, Paper] = {
    paper.key: paper
    for paper in (
        _aft,
        _hydra,
        _external,
        _synthesizer,
        _survey,
        _pvt,
        _registers,
        _livt,
        _abacus,
        _extrapolation,
        _transhuman,
        _explained,
    )
}


def find_paper(key: str) -> Paper:
    """Return the source called ``key``; a misspelt key is refused with the nearest ones."""
    if key not in PAPERS:
        raise MixerError(f"there is no paper {key!r}; {nearest(key, PAPERS)}.")
    return PAPERS[key]
