"""The rows whose sequences ranks can share."""

from __future__ import annotations

from cases import CASES, FIRST
from tokenmix import MixerError, build_mixer


def rows() -> list[str]:
    """Every case whose causal form has segments, or blocks of keys."""
    found = []
    for case, (name, options) in CASES.items():
        try:
            mixer = build_mixer(name, 8, causal=True, **options)
        except MixerError:
            continue
        if mixer.capabilities.segments or mixer.capabilities.key_blocks:
            found.append(case)
    return found


ROWS = rows()
BLOCKS = [case for case in ROWS if case.startswith(("attention", "aft_full")) and case != "aft_full-alibi"]
SEGMENTS = [c for c in (*FIRST.values(), "aft_full-alibi", "rfa-gate", "local-pool") if c in ROWS and c not in BLOCKS]
"""One case of each mixer that has segments, and three more."""
