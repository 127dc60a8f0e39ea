"""Test Hydra on the C kernels.

Adversarial keys, long and short tokens, odd sizes, masks, strides, half precision, threads, derivatives of derivatives.
"""

from __future__ import annotations

import pytest
import torch

from kernel_checks import adversarial, both, worst
from tokenmix import functional

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def qkv(B: int, T: int, S: int, D: int, dtype=torch.float32, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, n, D, generator=draw).to(dtype) for n in (T, S, S))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "feature", ["identity", "mean", "tanh", "elu/cosine", "sigmoid/softmax", "softmax/cosine", "identity/softmax"]
)
def test_adversarial_keys_of_other_maps(feature, causal):
    adversarial("hydra", {"causal": causal, "feature": feature}, dim=20, length=131)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e4, 1e15, 1e19, 1e30])
def test_tokens_of_any_size_keep_their_direction(size, causal):
    q, k, v = qkv(2, 70, 70, 40)
    long = torch.where(torch.arange(70)[:, None] % 3 == 0, size, 1.0)
    assert worst(both(functional.hydra, (q * long, k * long, v), {"causal": causal})[:1]) < 1e-5
    assert worst(both(functional.hydra, (q * size, k * size, v), {"causal": causal, "eps": 1e-30})) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_of_zeros_without_eps(causal):
    q, k, v = qkv(2, 70, 70, 40)
    q[:, 5], k[:, 7], k[0] = 0.0, 0.0, 1e-30
    leaves = [a.requires_grad_() for a in (q, k, v)]
    y = functional.hydra(*leaves, eps=0.0, causal=causal, backend="cpu")
    assert y[:, 5].eq(0).all()
    assert all(bool(a.isfinite().all()) for a in (y, *torch.autograd.grad(y.sum(), leaves)))


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sum_of_equal_terms_does_not_drift(causal):
    x = torch.full((1, 20_000, 3), 0.1)
    y = functional.hydra(x, x, x, causal=causal, feature="identity", normalise=True, backend="cpu")
    assert float((y / 1e-3 - 1).abs().max()) < 1e-6
