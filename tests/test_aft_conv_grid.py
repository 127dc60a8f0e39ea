"""AFT-conv on grids without a tensor of all pairs: equal to the dense form, in time linear in the cells."""

from __future__ import annotations

import sys

import pytest
import torch

from tokenmix import MixerError
from tokenmix.functional import aft_conv
from tokenmix.testing.tolerances import BY_DTYPE

form = sys.modules["tokenmix.functional.aft_conv"]


def arguments(grid, prefix, size, scale, heads=3, dim=6):
    g = torch.Generator().manual_seed(size)
    T = prefix + torch.Size(grid).numel()
    q, v = (torch.randn(2, T, dim, generator=g, dtype=torch.float64) for _ in range(2))
    k = torch.randn(2, T, heads, generator=g, dtype=torch.float64) * scale
    kernel = torch.randn(heads, *[size] * len(grid), generator=g, dtype=torch.float64) * scale / 10
    return [a.requires_grad_() for a in (q, k, v, kernel)], torch.rand(2, T, generator=g) > 0.3


@pytest.mark.parametrize(
    "form_of", [{}, {"filters": "signed"}, {"divide": False}, {"filters": "signed", "divide": False}]
)
@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize(
    ("grid", "prefix", "size"),
    [
        ((5,), 2, 3),
        ((4, 6), 0, 3),
        ((4, 6), 1, 5),
        ((3, 3), 2, 7),
        ((1, 9), 0, 3),
        ((3, 4, 2), 0, 3),
        ((3, 4, 5), 1, 3),
    ],
)
def test_the_sums_over_a_grid_equal_the_dense_form(monkeypatch, grid, prefix, size, scale, form_of):
    given, valid = arguments(grid, prefix, size, scale)
    options = {"grid": grid, "prefix": prefix, "backend": "eager", **form_of}
    for key_mask in (None, valid):
        found = aft_conv(*given, key_mask=key_mask, **options)
        up = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads = torch.autograd.grad(found, given, up)
        with monkeypatch.context() as patch:
            patch.setattr(form, "is_exporting", lambda: True)  # exported programs take the dense form
            wanted = aft_conv(*given, key_mask=key_mask, **options)
        for a, b in zip((found, *grads), (wanted, *torch.autograd.grad(wanted, given, up)), strict=True):
            assert (a - b).abs().max().item() <= BY_DTYPE[torch.float64] * max(1.0, b.abs().max().item())


def test_no_pair_of_cells_is_laid_out(monkeypatch):
    monkeypatch.setattr(form, "_dense_weights", None)
    given, _ = arguments((6, 5, 4), 1, 3, 1.0)
    assert aft_conv(*given, grid=(6, 5, 4), prefix=1, backend="eager").isfinite().all()


def test_a_grid_without_cells_is_refused_unless_there_are_no_tokens():
    given, _ = arguments((0, 5), 3, 3, 1.0)
    with pytest.raises(MixerError, match=r"grid=\(0, 5\) has no cells beside prefix=3"):
        aft_conv(*given, grid=(0, 5), prefix=3)
    given, _ = arguments((0, 5), 0, 3, 1.0)
    assert aft_conv(*given, grid=(0, 5)).shape == (2, 0, 6)
