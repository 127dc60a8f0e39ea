"""Lightweight and dynamic convolution: what the paper says of them, and how the two meet."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError, build_mixer, contrib
from tokenmix.mixers import Inputs


def test_weights_of_the_papers_example():
    """Section 3.1: for d = 1024, k = 7, sharing among H = 16 heads leaves 112 weights, against 7168 depthwise."""
    assert build_mixer("lightconv", 1024, heads=16, kernel_size=7).kernel.numel() == 112
    assert build_mixer("lightconv", 1024, heads=1024, kernel_size=7).kernel.numel() == 7168


def test_dynamic_with_a_constant_window_is_lightweight():
    torch.manual_seed(0)
    light = build_mixer("lightconv", 16, heads=4, kernel_size=5).double()
    dynamic = build_mixer("dynamicconv", 16, heads=4, kernel_size=5).double()
    dynamic.load_state_dict(light.state_dict(), strict=False)
    with torch.no_grad():
        dynamic.q_proj.weight.zero_()
        dynamic.q_proj.bias.copy_(light.kernel.flatten())
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(dynamic(x), light(x), rtol=1e-12, atol=1e-12)


def test_a_window_is_made_from_its_own_token():
    mixer = build_mixer("dynamicconv", 16, heads=4, kernel_size=5)
    x = torch.randn(1, 9, 16)
    options = {"positions": None, "key_mask": None}
    (_, before), _ = mixer.functional_args(Inputs(x, **options))
    x[:, 4] += 1
    (_, after), _ = mixer.functional_args(Inputs(x, **options))
    changed = (after != before).flatten(2).any(-1)[0]
    assert changed.tolist() == [t == 4 for t in range(9)]


def test_taps_sum_to_one_over_the_window_and_not_over_the_tokens():
    """A deviation to know: as in the paper a border, or a masked token, takes its share of the softmax away."""
    y = contrib.lightconv(torch.ones(1, 7, 4), torch.zeros(2, 5))
    torch.testing.assert_close(y[0, :, 0], torch.tensor([0.6, 0.8, 1.0, 1.0, 1.0, 0.8, 0.6]))
    masked = contrib.lightconv(
        torch.ones(1, 7, 4), torch.zeros(2, 5), key_mask=torch.tensor([[True, True, True, False, True, True, True]])
    )
    torch.testing.assert_close(masked[0, 2, 0], torch.tensor(0.8))


def test_causal_windows_may_be_even_and_others_not():
    assert build_mixer("lightconv", 8, causal=True, heads=2, kernel_size=4)(torch.randn(1, 6, 8)).shape == (1, 6, 8)
    for name in ("lightconv", "dynamicconv"):
        with pytest.raises(MixerError, match="odd"):
            build_mixer(name, 8, heads=2, kernel_size=4)
        with pytest.raises(MixerError, match="heads=3"):
            build_mixer(name, 8, heads=3)
    with pytest.raises(MixerError, match="odd"):
        contrib.lightconv(torch.ones(1, 7, 4), torch.zeros(2, 4))
    with pytest.raises(MixerError, match="kernel must be"):
        contrib.lightconv(torch.ones(1, 7, 4), torch.zeros(3, 5))


def test_the_state_does_not_grow():
    mixer = build_mixer("dynamicconv", 8, causal=True, heads=2, kernel_size=4)
    _, state = mixer.extend(torch.randn(2, 50, 8), mixer.init_state(2))
    assert state.values.shape == (2, 3, 8)
