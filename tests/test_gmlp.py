"""gMLP: its start, its Toeplitz form, its size."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError, build_mixer, contrib
from tokenmix.testing import inputs


def test_at_first_every_token_is_an_mlp_of_its_own():
    torch.manual_seed(0)
    mixer, x = build_mixer("gmlp", 8, max_len=12), torch.randn(1, 12, 8)
    with torch.no_grad():
        alone, y = mixer.out_proj(torch.nn.functional.gelu(mixer.v_proj(x)).chunk(2, -1)[0]), mixer(x)
    assert float((y - alone).abs().max()) < 0.02 * float(alone.abs().max())


@pytest.mark.parametrize("causal", [False, True])
def test_toeplitz_is_a_full_matrix_with_equal_diagonals(causal):
    torch.manual_seed(0)
    narrow = build_mixer("gmlp", 8, max_len=12, toeplitz=True, causal=causal).double()
    full = build_mixer("gmlp", 8, max_len=12, causal=causal).double()
    with torch.no_grad():
        narrow.spatial.normal_()
        index = torch.arange(12)
        state = {**narrow.state_dict(), "spatial": narrow.between(index, index)}
    full.load_state_dict(state)
    x = torch.randn(2, 10, 8, dtype=torch.float64)
    torch.testing.assert_close(narrow(x), full(x))


@pytest.mark.parametrize(("dim", "printed"), [(128, 5.9), (256, 19.5), (512, 73.4)])
def test_parameters_of_the_vision_models(dim, printed):
    """Count the parameters of gMLP-Ti, S, B: 30 blocks at 196 patches, hidden 6 dim.

    The paper prints 5.9, 19.5 and 73.4 million, which our count meets within half a percent.
    """
    layer = sum(p.numel() for p in build_mixer("gmlp", dim, max_len=196).parameters())
    assert layer == dim * 6 * dim + 6 * dim + 3 * dim * dim + dim + 196 * 196 + 196 + 6 * dim
    total = 768 * dim + dim + 30 * (layer + 2 * dim) + 2 * dim + dim * 1000 + 1000
    assert abs(total / 1e6 / printed - 1) < 0.006


def test_float32_is_exact_relative_to_the_largest_output():
    """Check the exception from accurate_on_adversarial_keys.

    Where gelu is nearly 0 its float32 form is exact relative to the input only.
    """
    torch.manual_seed(0)
    rest = torch.randn(150, 150), torch.randn(150), torch.randn(6), torch.randn(6)
    for name, z in inputs.adversarial_keys((1, 150, 12), size=100.0).items():
        z = z.float()
        y, exact = contrib.gmlp(z, *rest), contrib.gmlp(z.double(), *(a.double() for a in rest))
        assert float((y - exact).abs().max()) <= 1e-5 * max(1.0, float(exact.abs().max())), name


def test_resize():
    for toeplitz in (False, True):
        mixer = build_mixer("gmlp", 8, max_len=6, toeplitz=toeplitz)
        x = torch.randn(1, 6, 8)
        before = mixer(x)
        mixer.resize(11)
        assert mixer(torch.randn(1, 11, 8)).shape == (1, 11, 8)
        if toeplitz:
            torch.testing.assert_close(mixer(x), before)
        mixer.resize(4)
        with pytest.raises(MixerError, match="max_len=4"):
            mixer(x)
        with pytest.raises(MixerError, match="positive"):
            mixer.resize(0)


def test_hidden_must_be_even():
    with pytest.raises(MixerError, match="even"):
        build_mixer("gmlp", 8, max_len=6, hidden=7)
