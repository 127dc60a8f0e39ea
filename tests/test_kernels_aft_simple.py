"""Test AFT-simple on the C kernels.

Adversarial keys, odd sizes, masks, strides, half precision, threads, derivatives of derivatives.
"""

from __future__ import annotations

import pytest
import torch

from kernel_checks import both, worst
from tokenmix import functional
from tokenmix.testing import inputs

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def qkv(B: int, T: int, S: int, D: int, dtype=torch.float32, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, n, D, generator=draw).to(dtype) for n in (T, S, S))


def test_a_long_sum_of_equal_terms_does_not_drift():
    v = torch.full((1, 20_000, 3), 0.1)
    y = functional.aft_simple(v, torch.zeros_like(v), v, causal=True, gate=None, backend="cpu")
    assert float((y - 0.1).abs().max()) < 1e-7  # 2.6e-7 with totals in float32


def test_a_long_sum_over_all_keys_does_not_drift():
    v = torch.full((1, 20_000, 2), 0.1).requires_grad_()
    y = functional.aft_simple(v, torch.zeros_like(v), v, gate=None, backend="cpu")
    (grad,) = torch.autograd.grad((y * 0.1).sum(), v)
    assert max(float((y - 0.1).abs().max()), float((grad - 0.1).abs().max())) < 2e-6


@pytest.mark.parametrize("pattern", ["normal", "uniform", "ramp down", "alternating"])
def test_gradients_do_not_drift_over_a_long_sequence(pattern):
    """Products of ratios of denominators, which are all nearly 1, would be 3e-5 off here."""
    shape = (1, 8192, 4)
    keys = inputs.KEYS[pattern](shape, 0, 100.0).float()
    assert (
        worst(
            both(
                functional.aft_simple,
                (qkv(*shape[:2], *shape[1:])[0], keys, inputs.noise(*shape, seed=1).float()),
                {"causal": True},
            )
        )
        < 2e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_precision_number_is_read_and_rounded(dtype):
    """Check that one token gives back its value, and two equal keys the mean of two values.

    Neighbours above all, rounded as torch rounds.
    """
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    v = every[every.isfinite()][None, None]
    y = functional.aft_simple(v, v * 0, v, gate=None, causal=True, backend="cpu")
    assert torch.equal(y, v)
    v = v[v.abs() < 1e38][None, None]  # the sum of two is finite
    for other in (v.roll(1, -1), v.roll(7, -1)):
        y = functional.aft_simple(
            v.expand(1, 2, -1),
            torch.zeros(1, 2, v.shape[-1], dtype=dtype),
            torch.cat([v, other], 1),
            gate=None,
            backend="cpu",
        )
        assert torch.equal(y[:, :1], ((v.double() + other.double()) / 2).to(dtype))


def test_a_gradient_too_large_for_float16_is_infinite():
    v = torch.ones(1, 1, 1, dtype=torch.float16).requires_grad_()
    q = torch.zeros(1, 2, 1, dtype=torch.float16)
    y = functional.aft_simple(q, torch.zeros_like(v), v, gate=None, backend="cpu")
    assert float(torch.autograd.grad(y, v, torch.full_like(y, 6e4))[0]) == float("inf")
