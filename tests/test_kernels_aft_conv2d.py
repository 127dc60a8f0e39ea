"""Test AFT-conv on 2-D grids: the C kernel and its float64 form for wide weights against the eager one.

Borders of its tiles, masks, half precision, derivatives.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kernel_checks import both, worst
from tokenmix import functional
from tokenmix.kernels.cpu import aft_conv2d as conv2d

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FORMS = ["kernel", "wide"]


def given(B, grid, h, D, s, *, prefix=0, dtype=torch.float32, span=2.0):
    T, draw = prefix + grid[0] * grid[1], torch.Generator().manual_seed(0)
    q, v = (torch.randn(B, T, D, generator=draw).to(dtype) for _ in range(2))
    k, w = 2 * torch.randn(B, T, h, generator=draw), span * torch.randn(h, s, s, generator=draw)
    return (q, k.to(dtype), v, w.to(dtype)), {"grid": grid, "prefix": prefix}


def only(form):
    """One form whatever the weights."""
    return (
        mock.patch.object(conv2d, "_forward_wide", None)
        if form == "kernel"
        else mock.patch.object(conv2d, "SPAN", -1.0)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("gate", ["sigmoid", None, "tanh"])
@pytest.mark.parametrize(
    ("B", "grid", "h", "D", "s"),
    [(1, (1, 2), 1, 1, 1), (2, (5, 7), 3, 12, 3), (1, (9, 4), 4, 4, 5), (2, (3, 11), 1, 6, 11)],
)
def test_equals_eager(B, grid, h, D, s, gate, dtype, form):
    for prefix in (0, 2):
        args, options = given(B, grid, h, D, s, prefix=prefix, dtype=dtype)
        with only(form):
            pairs = both(functional.aft_conv, args, {**options, "gate": gate})
        assert worst(pairs) < TOL[dtype]


@pytest.mark.parametrize("form", FORMS)
def test_masked_keys_have_no_influence(form):
    (q, k, v, w), options = given(3, (6, 5), 2, 8, 5, prefix=1)
    mask = torch.rand(3, 31, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[2] = False
    k, v = (torch.where(mask[..., None], a, 1e30) for a in (k, v))
    with only(form):
        pairs = both(functional.aft_conv, (q, k, v, w), {**options, "key_mask": mask})
        assert worst(pairs) < 1e-5
        assert torch.cat([pairs[0][0][2].flatten(), pairs[2][0][~mask].flatten()]).eq(0).all()
        nan = torch.where(mask[..., None], v, float("nan"))
        assert torch.equal(
            functional.aft_conv(
                q, torch.where(mask[..., None], k, float("nan")), nan, w, key_mask=mask, **options, backend="cpu"
            ),
            pairs[0][0],
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keys", [100.0, 1e4])
@pytest.mark.parametrize("span", [29.0, 60.0])
def test_keys_and_weights_of_any_size(form, keys, span):
    args, options = given(2, (8, 8), 2, 8, 5)
    args = args[0], keys * (2 * torch.rand_like(args[1]) - 1), args[2], span * (2 * torch.rand_like(args[3]) - 1)
    if span < 30:
        with only(form):
            assert worst(both(functional.aft_conv, args, options)) < 1e-5
    else:  # wide weights run dense in float64
        with (
            mock.patch.object(conv2d, "_forward", None),
            mock.patch.object(conv2d, "_backward", None),
            mock.patch.object(conv2d, "BLOCK", 300),
        ):
            assert worst(both(functional.aft_conv, args, options)) < 1e-6


@pytest.mark.parametrize("grid", [(14, 14), (1, 15), (15, 1), (3, 29), (5, 13), (2, 130), (70, 3)], ids=str)
@pytest.mark.parametrize("s", [1, 11, 13, 15, 27, 31])
def test_borders_of_tiles_and_sums(grid, s):
    """Check rows of one tile and of several, filters wider than the grid and narrower.

    Prefix sums and groups of rows of one level and of two.
    """
    args, options = given(2, grid, 2, 6, s, prefix=s % 3)
    assert worst(both(functional.aft_conv, args, options)) < 3e-6


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 16, 17, 33])
@pytest.mark.parametrize("per", [1, 2, 12, 16, 19, 40])
def test_heads_of_any_width(heads, per):
    """Strips of channels that lie in one head, cross heads or hold many of them, and rest lanes."""
    args, options = given(2, (3, 4), heads, heads * per, 3)
    assert worst(both(functional.aft_conv, args, options)) < 3e-6


def test_long_sums_do_not_drift():
    v = torch.full((1, 20_000, 1), 0.1)
    for s in (1, 129):
        y = functional.aft_conv(
            v, torch.full_like(v, 0.1), v, torch.zeros(1, s, s), grid=(1, 20_000), gate=None, backend="cpu"
        )
        assert float((y - 0.1).abs().max()) < 1e-6


def test_large_grids_hold_no_pairs():
    args, options = given(1, (68, 120), 2, 4, 11)
    with mock.patch.object(conv2d, "Matrix", None):
        y = functional.aft_conv(*args, **options, backend="cpu")
    rows = torch.tensor([0, 4000, 8159])
    offset = torch.cartesian_prod(torch.arange(68), torch.arange(120))
    d = offset[None] - offset[rows, None] + 5
    inside = ((d >= 0) & (d < 11)).all(-1)
    w = torch.where(inside, args[3].double()[:, d[..., 0].clamp(0, 10), d[..., 1].clamp(0, 10)], 0.0)
    p = (w[None] + args[1].double().transpose(1, 2)[:, :, None]).softmax(-1)
    want = (
        torch.einsum("bhts,bshc->bthc", p, args[2].double().unflatten(2, (2, 2))).flatten(2)
        * args[0].double()[:, rows].sigmoid()
    )
    assert float((y[:, rows] - want).abs().max()) < 1e-5
