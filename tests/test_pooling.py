"""Pooling as a mixer: the paper's own code, and what a mixer without parameters must still do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokenmix import MixerError, build_mixer, contrib
from tokenmix.testing import inputs


def test_on_a_grid_it_is_the_papers_average_pooling():
    x = torch.randn(2, 30, 4)
    image = x.unflatten(1, (5, 6)).permute(0, 3, 1, 2)
    for window in (3, 5):
        pool = nn.AvgPool2d(window, stride=1, padding=window // 2, count_include_pad=False)
        want = (pool(image) - image).flatten(2).mT
        torch.testing.assert_close(build_mixer("pooling", 4, window=window, ndim=2)(x, grid=(5, 6)), want)


def test_on_a_sequence_it_is_average_pooling_along_it():
    x, pool = torch.randn(2, 9, 4), nn.AvgPool1d(3, stride=1, padding=1, count_include_pad=False)
    torch.testing.assert_close(build_mixer("pooling", 4, subtract=False)(x), pool(x.mT).mT)


def test_masked_tokens_are_not_counted():
    y = contrib.pooling(
        torch.tensor([[[3.0], [6.0], [9.0]]]), window=3, subtract=False, key_mask=torch.tensor([[True, False, True]])
    )
    torch.testing.assert_close(y[0, :, 0], torch.tensor([3.0, 6.0, 9.0]))


def test_float32_is_exact_relative_to_the_tokens():
    """The exception from accurate_on_adversarial_keys: on a ramp the mean minus the token is 0 but for rounding."""
    for name, x in inputs.adversarial_keys((1, 150, 8), size=100.0).items():
        x = x.float()
        error = (contrib.pooling(x, window=7) - contrib.pooling(x.double(), window=7)).abs().max()
        assert float(error) <= 1e-6 * float(x.abs().max()), name


def test_it_has_no_parameters_and_its_state_is_where_it_is():
    mixer = build_mixer("pooling", 8, causal=True).to(torch.bfloat16)
    assert not list(mixer.parameters())
    assert not mixer.state_dict()
    assert mixer.init_state(2).values.dtype == torch.bfloat16
    assert mixer.init_state(2, dtype=torch.float64).values.dtype == torch.float64


def test_what_it_refuses():
    x = torch.randn(1, 6, 4)
    with pytest.raises(MixerError, match="odd"):
        build_mixer("pooling", 4, window=2)
    with pytest.raises(MixerError, match="grid"):
        build_mixer("pooling", 4, ndim=2)(x)
    with pytest.raises(MixerError, match="ndim=1"):
        build_mixer("pooling", 4)(x, grid=(2, 3))
    with pytest.raises(MixerError, match="prefix"):
        build_mixer("pooling", 4, ndim=2)(torch.randn(1, 7, 4), grid=(2, 3), prefix=1)
    with pytest.raises(MixerError, match="ndim must be"):
        build_mixer("pooling", 4, ndim=2, causal=True)
