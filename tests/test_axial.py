"""Axial attention: who reaches whom, sums and sequences of axes, cost and parameters."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from test_image_local import seen
from tokenmix import MixerError, build_mixer, functional


def built(dim=8, **options):
    torch.manual_seed(0)
    return build_mixer("axial", dim, **{"heads": 2, **options}).double().eval()


def test_in_turn_every_token_reaches_every_token_and_summed_its_lines_only():
    grid = {"grid": (3, 4)}
    assert all(s == set(range(12)) for s in seen(built(width=None), 12, **grid))
    assert seen(built(width=None, combine="sum"), 12, **grid)[5] == {4, 5, 6, 7, 1, 9}
    sees = seen(built(width=None, combine="sum"), 14, prefix=2, **grid)
    assert sees[0] == sees[1] == set(range(14))
    assert sees[7] == {0, 1, 6, 7, 8, 9, 3, 11}


def test_causal_every_earlier_token_reaches_every_later_one():
    """No line is read before it has ended, and none is lost."""
    for t, s in enumerate(seen(built(width=4, causal=True), 15)):
        assert s == set(range(t + 1))


def test_one_line_is_attention():
    """Where the width holds all tokens, the row stage is attention and each column is one token: its value."""
    mixer, x = built(width=12, combine="sum"), torch.randn(2, 9, 8, dtype=torch.float64)
    (q, _), (k, _), (v, own) = (p(x).chunk(2, -1) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    torch.testing.assert_close(
        mixer(x), mixer.out_proj(functional.attention(q, k, v, heads=2) + own), rtol=1e-12, atol=1e-12
    )


def test_the_causal_form_ends_where_attention_does():
    """On one line it is causal attention with the inner projections."""
    mixer, x = built(width=12, causal=True), torch.randn(2, 9, 8, dtype=torch.float64)
    q, k, v = mixer.q_proj(x).chunk(3, -1)[2], mixer.k_proj(x).chunk(2, -1)[1], mixer.v_proj(x).chunk(2, -1)[1]
    torch.testing.assert_close(
        mixer(x), mixer.out_proj(functional.attention(q, k, v, heads=2, causal=True)), rtol=1e-12, atol=1e-12
    )


def test_the_order_of_the_axes_counts():
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    a, b = built(width=None, order=[1, 0]), built(width=None, order=[0, 1])
    assert not torch.allclose(a(x, grid=(3, 4)), b(x, grid=(3, 4)))
    turned = x.view(1, 3, 4, 8).transpose(1, 2).reshape(1, 12, 8)
    torch.testing.assert_close(
        b(turned, grid=(4, 3)).view(1, 4, 3, 8).transpose(1, 2).reshape(1, 12, 8),
        a(x, grid=(3, 4)),
        rtol=1e-12,
        atol=1e-12,
    )


def test_cost_is_that_of_the_lines():
    """Four times the pixels: eight times the pairs, T (H + W)."""
    joined = []
    for side in (16, 32):
        mixer = built(width=None)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            mixer(torch.randn(1, side * side, 8, dtype=torch.float64), grid=(side, side))
        cost = mixer.cost(side * side)
        assert counter.get_total_flops() == cost.flops
        joined.append(cost.mixing)
    assert joined[1] == 8 * joined[0]


def test_parameters():
    D = 8
    assert built(width=None).cost(16).parameters == 7 * (D * D + D)
    assert built(width=None, combine="sum").cost(16).parameters == 7 * (D * D + D)
    assert built(width=None, ndim=3).cost(8).parameters == 10 * (D * D + D)
    assert built(width=4, causal=True).cost(8).parameters == 10 * (D * D + D)


def test_what_has_no_causal_form_says_so():
    for options in ({"width": None}, {"combine": "sum"}, {"order": [0, 1]}):
        with pytest.raises(MixerError, match="causal"):
            built(causal=True, **options)


def test_a_missing_crossing_hides_what_lies_behind_it():
    """(0, 0) reaches (1, 1) through (0, 1), whose row it is in and whose column asks it."""
    torch.manual_seed(0)
    mixer, x = build_mixer("axial", 8, heads=2, width=None).double(), torch.randn(1, 4, 8, dtype=torch.float64)
    other = torch.cat([torch.randn(1, 1, 8, dtype=torch.float64), x[:, 1:]], 1)
    there, missing = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[True, False, True, True]])
    for mask, reaches in ((there, True), (missing, False)):
        apart = mixer(other, grid=(2, 2), key_mask=mask)[0, 3] - mixer(x, grid=(2, 2), key_mask=mask)[0, 3]
        assert (float(apart.detach().abs().max()) > 1e-6) is reaches
