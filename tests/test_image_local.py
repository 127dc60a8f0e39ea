"""Local attention on images: which tokens a query sees, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tokenmix import MixerError, build_mixer
from tokenmix.testing import PROMISES, subject


def seen(mixer, T: int, **given) -> list[set[int]]:
    """For each output the tokens that have a gradient from it."""
    x = torch.randn(1, T, mixer.dim, dtype=torch.float64, requires_grad=True)
    y = mixer(x, **given)
    return [
        set(torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)[0][0].abs().sum(-1).nonzero()[:, 0].tolist())
        for t in range(T)
    ]


def built(**options):
    torch.manual_seed(0)
    return build_mixer("image_local", 8, **{"heads": 2, **options}).double().eval()


def test_blocks_along_the_raster():
    sees = seen(built(block=3, memory=2), 8)
    assert sees[0] == sees[2] == {0, 1, 2}
    assert sees[3] == sees[5] == {1, 2, 3, 4, 5}
    assert sees[7] == {4, 5, 6, 7}
    assert seen(built(block=3, memory=2, causal=True), 8)[4] == {1, 2, 3, 4}


def test_blocks_of_an_image():
    """An image of 4 x 6 in blocks of 2 x 2 with one row above and one column on either side."""
    mixer = built(ndim=2, block=2, memory=1)
    sees = seen(mixer, 24, grid=(4, 6))
    block = {r * 6 + c for r in (1, 2, 3) for c in (1, 2, 3, 4)}
    assert sees[2 * 6 + 2] == sees[3 * 6 + 3] == block
    assert sees[0] == {0, 1, 2, 6, 7, 8}
    causal = built(ndim=2, block=2, memory=1, width=6, causal=True)
    assert seen(causal, 24)[2 * 6 + 3] == {t for t in block if t <= 2 * 6 + 3}


def test_prefix_tokens_see_all_and_are_seen_by_all():
    sees = seen(built(ndim=2, block=2, memory=0), 2 + 16, grid=(4, 4), prefix=2)
    assert sees[0] == sees[1] == set(range(18))
    assert sees[2] == {0, 1, 2, 3, 6, 7}


def test_one_block_is_attention():
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    for causal in (False, True):
        mixer, plain = (
            built(block=9, memory=0, causal=causal),
            build_mixer("attention", 8, heads=2, causal=causal).double(),
        )
        plain.load_state_dict(mixer.state_dict())
        torch.testing.assert_close(mixer(x), plain(x), rtol=1e-12, atol=1e-12)


def test_the_token_before_reaches_along_the_raster():
    """The exception of the class is of its two-dimensional form alone."""
    PROMISES["token_before_reaches"](subject("image_local", {"heads": 2, "block": 3, "memory": 1, "causal": True}))


def test_the_cost_grows_with_the_length():
    counts = []
    for T in (512, 1024):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            built(block=16, memory=16)(torch.randn(1, T, 8, dtype=torch.float64))
        counts.append(counter.get_total_flops())
    assert counts[1] == 2 * counts[0]
    mixer = built(block=16, memory=16)
    assert counts[0] == mixer.cost(512).flops


def test_a_causal_image_needs_its_width():
    with pytest.raises(MixerError, match="width"):
        built(ndim=2, causal=True)
    with pytest.raises(MixerError, match="grid"):
        built(ndim=2)(torch.randn(1, 4, 8, dtype=torch.float64))
