"""Fourier mixing: the fast transform, the written-out one, and padding."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError, build_mixer, contrib
from tokenmix.testing import inputs


def test_it_is_the_real_part_of_the_transform_in_both_forms():
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    want = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
    torch.testing.assert_close(contrib.fourier(x), want)
    torch.testing.assert_close(contrib.fourier(x, key_mask=torch.ones(2, 11, dtype=torch.bool)), want)
    torch.testing.assert_close(contrib.fourier(x, positions=torch.arange(11).expand(2, 11)), want)


def test_a_row_is_transformed_at_its_own_length():
    """A transform of the padded batch, as in the public copies, which take no mask, gives every token other numbers."""
    x, mask = torch.randn(2, 11, 6), torch.arange(11) < torch.tensor([[7], [11]])
    padded = torch.where(mask[..., None], x, 0.0)
    ours, theirs = contrib.fourier(x, key_mask=mask), torch.fft.fft2(padded).real
    torch.testing.assert_close(ours[0, :7], torch.fft.fft2(x[0, :7]).real, rtol=1e-4, atol=1e-5)
    assert float((theirs[0, 1:7] - ours[0, 1:7]).abs().max()) > 1


def test_twice_gives_the_sequence_reversed():
    """Check that the transform applied twice gives T D / 2 times x plus x reversed along both axes.

    This is a property of the real transform: the real part loses the imaginary one.
    """
    x = torch.randn(1, 8, 6, dtype=torch.float64)
    mirrored = x.flip(1, 2).roll((1, 1), (1, 2))
    torch.testing.assert_close(contrib.fourier(contrib.fourier(x)), 8 * 6 / 2 * (x + mirrored))


def test_float32_is_exact_relative_to_the_input():
    """Check the exception from accurate_on_adversarial_keys.

    Sums cancel to 0, but relative to the size of the whole input the error is small.
    """
    mask = inputs.key_masks(150)["mixed"][:1]
    for name, x in inputs.adversarial_keys((1, 150, 8), size=100.0).items():
        x = x.float()
        for given in ({}, {"key_mask": mask}):
            error = (contrib.fourier(x, **given) - contrib.fourier(x.double(), **given)).abs().max()
            assert float(error) <= 1e-6 * float(x.abs().sum()), name


def test_there_is_no_causal_form():
    with pytest.raises(MixerError, match="no causal form"):
        build_mixer("fourier", 8, causal=True)
    with pytest.raises(MixerError, match="no causal form"):
        contrib.fourier(torch.randn(1, 4, 8), causal=True)


def test_long_rows_keep_their_phases():
    """At 4096 tokens the written-out form still equals the fast one: whole turns are taken off in float64."""
    x = torch.randn(1, 4096, 2)
    written = contrib.fourier(x, key_mask=torch.ones(1, 4096, dtype=torch.bool))
    assert float((written - contrib.fourier(x)).abs().max()) < 1e-5 * float(x.abs().sum())
