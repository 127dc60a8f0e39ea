"""Test Linear attention on the C kernels.

Adversarial keys, odd sizes, masks, strides, half precision, threads, derivatives of derivatives.
"""

from __future__ import annotations

import pytest
import torch

from kernel_checks import adversarial, both, worst
from tokenmix import MixerError, functional
from tokenmix.functional.linear import ratio_kernel

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def qkv(B: int, T: int, S: int, D: int, dtype=torch.float32, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, n, D, generator=draw).to(dtype) for n in (T, S, S))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["elu", "exp", "softmax"])
@pytest.mark.parametrize(("dim", "heads", "length"), [(8, 2, 150), (66, 2, 131), (3, 3, 65), (40, 1, 1)])
def test_adversarial_keys(dim, heads, length, feature, causal):
    adversarial("linear", {"heads": heads, "causal": causal, "feature": feature}, dim=dim, length=length)


@pytest.mark.parametrize("causal", [False, True])
def test_jumps_within_blocks_are_done_token_by_token(causal):
    """Keys that rise by hundreds inside one block: sums under the units of its end would lose all that came before."""
    q, k, v = qkv(2, 200, 200, 16)
    k = (
        k
        + torch.where(torch.arange(200) < 90, -120.0, 0.0)[:, None]
        + torch.where(torch.arange(200) >= 170, 80.0, 0.0)[:, None]
    )
    options = {"heads": 2, "causal": causal, "feature": "exp"}
    pairs = both(functional.linear_attention, (q, k, v), options)
    assert worst(pairs) < 1e-5
    saved = ratio_kernel.forward(q, k, v, None, 2, False, causal, True)[1]
    assert not causal or saved[..., 200:].tolist() == [[[0.0, 1.0, 1.0, 0.0]] * 2] * 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["elu", "exp"])
def test_finite_at_large_keys(feature, causal):
    for size in (1e3, 1e4, 1e6):
        args = [(a * s).requires_grad_() for a, s in zip(qkv(1, 130, 130, 8), (1.0, size, 1.0), strict=True)]
        y = functional.linear_attention(*args, heads=2, causal=causal, feature=feature, backend="cpu")
        assert all(bool(a.isfinite().all()) for a in (y, *torch.autograd.grad(y.sum(), args)))


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sum_of_equal_terms_does_not_drift(causal):
    x = torch.full((1, 20_000, 3), 0.1)
    y = functional.linear_attention(x, x, x, heads=1, causal=causal, backend="cpu")
    assert (
        float((y / 0.1 - 1).abs().max()) < 3e-6
    )  # the 64 terms of a block are rounded alike; what grows with the length is far above


def test_features_that_may_be_zero_stay_on_the_eager_form():
    q, k, v = qkv(1, 5, 5, 4)
    with pytest.raises(MixerError, match="relu"):
        functional.linear_attention(q, k, v, heads=2, feature="relu", backend="cpu")
    assert torch.equal(
        functional.linear_attention(q, k, v, heads=2, feature="relu"),
        functional.linear_attention(q, k, v, heads=2, feature="relu", backend="eager"),
    )
