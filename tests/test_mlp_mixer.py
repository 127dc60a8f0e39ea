"""Token mixing of the MLP-Mixer, and what a Random Synthesizer has of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokenmix import MixerError, build_mixer, contrib
from tokenmix.testing import inputs


def test_at_full_length_it_is_two_linears_on_the_transpose():
    torch.manual_seed(0)
    mixer = build_mixer("mlp_mixer", 8, max_len=12, hidden=5).double()
    first, second = nn.Linear(12, 5).double(), nn.Linear(5, 12).double()
    with torch.no_grad():
        for p, q in zip(
            (mixer.w1, mixer.b1, mixer.w2, mixer.b2), (*first.parameters(), *second.parameters()), strict=True
        ):
            p.copy_(q)
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    torch.testing.assert_close(mixer(x), second(nn.functional.gelu(first(x.mT))).mT)


def test_parameters_of_mixer_s16():
    """Mixer-S/16 (N = 196, D = 512, token width 256, channel width 2048, 8 layers): 18.5 million, printed as 18."""
    token = sum(p.numel() for p in build_mixer("mlp_mixer", 512, max_len=196, hidden=256).parameters())
    assert token == 2 * 196 * 256 + 256 + 196
    channel, norms = 2 * 512 * 2048 + 2048 + 512, 2 * 2 * 512
    total = 768 * 512 + 512 + 8 * (token + channel + norms) + 2 * 512 + 512 * 1000 + 1000
    assert total == 18_528_264


def test_float32_is_exact_relative_to_the_terms():
    """Check the exception from accurate_on_adversarial_keys.

    Signed sums cancel; relative to the sum of their sizes the error is small.
    """
    torch.manual_seed(0)
    weights = torch.randn(6, 150), torch.randn(6), torch.randn(150, 6), torch.randn(150)
    w1, b1, w2, b2 = (a.double() for a in weights)
    for name, x in inputs.adversarial_keys((1, 150, 8), size=100.0).items():
        x = x.float()
        y, exact = contrib.mlp_mixer(x, *weights), contrib.mlp_mixer(x.double(), w1, b1, w2, b2)
        sizes = w2.abs() @ (w1.abs() @ x.double().abs() + b1.abs()[:, None]) + b2.abs()[:, None]
        assert float(((y - exact).abs() / sizes).max()) < 1e-6, name


def test_there_is_no_causal_form():
    with pytest.raises(MixerError, match="no causal form"):
        build_mixer("mlp_mixer", 8, max_len=12, causal=True)
    with pytest.raises(MixerError, match="no causal form"):
        contrib.mlp_mixer(*(torch.ones(s) for s in ((1, 4, 8), (3, 4), (3,), (4, 3), (4,))), causal=True)


def test_resize():
    mixer = build_mixer("mlp_mixer", 8, max_len=6, hidden=4)
    mixer.resize(11)
    assert mixer(torch.randn(1, 11, 8)).shape == (1, 11, 8)
    mixer.resize(5)
    with pytest.raises(MixerError, match="max_len=5"):
        mixer(torch.randn(1, 6, 8))
    with pytest.raises(MixerError, match="positive"):
        mixer.resize(0)


class TestRandomSynthesizerContainsLinearTokenMixing:
    """Check that a Random Synthesizer contains linear token mixing.

    A head of it is softmax(R) V with R learned; one layer of linear token mixing is W V. The perceptron's gelu is not
    contained.
    """

    @staticmethod
    def synthesizer(R: torch.Tensor, factors: list[float], width: int) -> nn.Module:
        """Build the layer with a head of full width for each R (heads, N, N).

        Each head reads x as it is and comes out times its factor.
        """
        mixer = build_mixer(
            "synthesizer_random",
            width,
            max_len=R.shape[-1],
            heads=len(R),
            head_dim=width,
            qkv_bias=False,
            out_bias=False,
        ).double()
        one = torch.eye(width, dtype=torch.float64)
        with torch.no_grad():
            mixer.logits.weight.copy_(R)
            mixer.v_proj.weight.copy_(torch.cat([one] * len(R)))
            mixer.out_proj.weight.copy_(torch.cat([factor * one for factor in factors], 1))
        return mixer

    def test_a_row_stochastic_mixing_is_one_head(self):
        """W with positive rows that sum to 1 is softmax(R) for R = log W."""
        torch.manual_seed(0)
        W, V = torch.rand(9, 9, dtype=torch.float64) + 0.01, torch.randn(9, 4, dtype=torch.float64)
        W = W / W.sum(-1, keepdim=True)
        torch.testing.assert_close(self.synthesizer(W.log()[None], [1.0], 4)(V[None])[0], W @ V)

    def test_a_mixing_whose_rows_have_one_sum_is_two_heads(self):
        """W = a softmax(R1) - b softmax(R2), a - b = the sum of a row; the factors belong to the projections."""
        torch.manual_seed(0)
        W, V = torch.randn(9, 9, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
        W = W - W.mean(-1, keepdim=True) + 0.3  # every row sums to 2.7
        up = W.clamp_min(0) + 0.01
        a = up.sum(-1).max()
        filled = up + (a - up.sum(-1, keepdim=True)) / 9  # rows of one sum; what is added comes off again
        down = filled - W
        b = down.sum(-1).mean()
        torch.testing.assert_close(a - b, torch.tensor(2.7, dtype=torch.float64))
        mixer = self.synthesizer(torch.stack([filled.log(), down.log()]), [float(a), -float(b)], 4)
        torch.testing.assert_close(mixer(V[None])[0], W @ V)

    def test_any_mixing_is_two_heads_and_a_token_of_value_zero(self):
        """Check that any mixing is two heads and one more token, of value 0.

        softmax rows sum to 1, so sums of rows that differ need somewhere to put the rest.
        """
        torch.manual_seed(0)
        W, V = torch.randn(9, 9, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
        up, down = W.clamp_min(0) + 0.01, (-W).clamp_min(0) + 0.01
        c = 1 + torch.maximum(up.sum(-1), down.sum(-1)).max()
        rows = [torch.cat([part / c, 1 - part.sum(-1, keepdim=True) / c], -1).log() for part in (up, down)]
        R = torch.stack(
            [torch.cat([part, torch.zeros(1, 10, dtype=torch.float64)]) for part in rows]
        )  # what the last token reads is its own affair
        values = torch.cat([V, torch.zeros(1, 4, dtype=torch.float64)])
        torch.testing.assert_close(self.synthesizer(R, [float(c), -float(c)], 4)(values[None])[0, :9], W @ V)

    def test_the_layer_is_such_a_mixing_where_gelu_is_linear(self):
        """Check that the Mixer's layer is W2 W1 X, up to the biases taken off again.

        With a large bias on every hidden unit gelu is the identity.
        """
        torch.manual_seed(0)
        w1, w2, x = torch.rand(5, 9).double(), torch.rand(9, 5).double(), torch.randn(1, 9, 4).double()
        b1 = torch.full((5,), 50.0, dtype=torch.float64)
        y = contrib.mlp_mixer(x, w1, b1, w2, -(w2 @ b1))
        W = w2 @ w1
        scale = W.sum(-1, keepdim=True)
        torch.testing.assert_close(y, scale * self.synthesizer(W.log()[None], [1.0], 4)(x))
