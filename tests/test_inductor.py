"""Test torch.compile with its default backend, forward and backward.

Two rows in `make test-more`, every mixer and every grid in `make test-all`.
"""

from __future__ import annotations

import pytest
import torch

from cases import CASES, FIRST, GRIDS, forms
from tokenmix import build_mixer

QUICK = [("attention", True), ("aft_simple", True)]
LATER = [form for form in forms() if form not in QUICK and form[0] in {*FIRST.values(), *GRIDS}]


def compiled_equals_eager(case: str, causal: bool) -> None:
    """One mixer, compiled without a graph break, against itself uncompiled: outputs and all gradients."""
    torch.compiler.reset()
    torch.manual_seed(0)
    name, options = CASES[case]
    mixer = build_mixer(name, 8, causal=causal, **options).eval()
    given = {} if case not in GRIDS else {"grid": GRIDS[case][0], "prefix": GRIDS[case][1]}
    T = 12 if case not in GRIDS else GRIDS[case][1] + int(torch.tensor(GRIDS[case][0]).prod())
    x = torch.randn(2, T, 8, requires_grad=True)
    found = []
    for run in (mixer, torch.compile(mixer, fullgraph=True)):
        y = run(x, **given)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()], allow_unused=True)])
    for plain, fast in zip(*found, strict=True):
        assert (plain is None) == (fast is None)
        if plain is not None:
            torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("case", "causal"), QUICK)
def test_inductor_on_two_rows(case, causal):
    compiled_equals_eager(case, causal)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "causal"), LATER)
def test_inductor_on_every_row(case, causal):
    compiled_equals_eager(case, causal)
