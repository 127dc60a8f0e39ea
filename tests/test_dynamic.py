"""Compiled once for every length: lengths, and the numbers among the options, are symbols then.

The first case of each mixer, both ways: its further cases are compiled by the contract, one length at a time.
"""

from __future__ import annotations

import pytest
import torch

from cases import FIRST, GRIDS, forms, subject_of

EARLY = (("polynl", False), ("gated_delta", True))
"""What `make test-more` compiles: a cheap row, and the recurrences, whose checks once could not be traced."""


def rows() -> list:
    """One row for each run, all first cases for the slow ones; a grid is one length."""
    return [
        pytest.param(*row, marks=[] if tuple(row) in EARLY else [pytest.mark.slow], id=f"{row[0]}-{row[1]}")
        for row in forms()
        if row[0] not in GRIDS and row[0] in {EARLY[0][0], *FIRST.values()}
    ]


@pytest.mark.parametrize(("case", "causal"), rows())
def test_compiles_for_any_length(case, causal):
    s = subject_of(case, causal)
    torch._dynamo.reset()
    mixer = s.build(dtype=torch.float32)
    fast = torch.compile(mixer, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (s.length, s.length - 3):
        x = s.x(length=length, dtype=torch.float32)
        torch.testing.assert_close(fast(x), mixer(x), rtol=2e-5, atol=2e-5)
    torch._dynamo.reset()
