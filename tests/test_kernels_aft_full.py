"""Test AFT-full on the C kernels.

Adversarial keys and weights, odd sizes, factors, masks, strides, half precision, threads, derivatives of derivatives.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernel_checks import adversarial, both, worst
from tokenmix import functional
from tokenmix.kernels.cpu import aft_full
from tokenmix.testing.measure import Measure, adversarial_cases
from tokenmix.testing.subject import roles

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def qkvw(B: int, T: int, S: int, D: int, dtype=torch.float32, *, batched: bool = False, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, n, D, generator=draw).to(dtype) for n in (T, S, S))
    return q, k, v, torch.randn((B, T, S) if batched else (T, S), generator=draw).to(dtype)


def factored(q, k, v, u1, u2, **options):
    return functional.aft_full(q, k, v, (u1, u2), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rank", [None, 1, 5])
def test_adversarial_keys_by_how_the_bias_is_given(rank, causal):
    adversarial("aft_full", {"causal": causal, "max_len": 100, "rank": rank}, dim=9, length=100)


@pytest.mark.parametrize("causal", [False, True])
def test_wide_keys_meet_wide_weights_across_blocks(causal):
    """Check groups of rows in which neither keys nor weights alone are narrow.

    Only some groups are such: both paths in one strip, over several blocks of rows and keys.
    """
    q, k, v, w = qkvw(2, 700, 700, 35)
    k, w = k * 4, w * 10
    k[0, 333, :5], k[1, 610, 20:] = 100.0, -300.0
    w[:300], w[500:520] = w[:300] / 50, w[500:520] * 2
    assert worst(both(functional.aft_full, (q, k, v, w), {"causal": causal})) < 1e-5


def test_a_masked_key_may_hold_the_largest_weight():
    q, k, v, w = qkvw(2, 90, 90, 20)
    mask = torch.ones(2, 90, dtype=torch.bool)
    mask[0, 7] = mask[1, 11] = False
    w[:, 7] = 150.0
    w[5, 30:], w[60:, 13] = -1e4, float("-inf")
    for causal in (False, True):
        pairs = both(functional.aft_full, (q, k, v, w), {"causal": causal, "key_mask": mask})
        assert worst(pairs[:4]) < 1e-5


def test_weights_above_300_count_as_300():
    q, k, v, w = qkvw(1, 60, 60, 5)
    w[3, 4], w[8, 2], w[50, 1] = 1e30, 301.0, 2000.0
    assert worst(both(functional.aft_full, (q, k, v, w), {})) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [511, 512, 513, 1029])
def test_lengths_around_a_block(T, causal):
    assert worst(both(functional.aft_full, qkvw(1, T, T, 3), {"causal": causal})) < 1e-5


@pytest.fixture(params=["float32", "pairs", "tiles"])
def route(request, monkeypatch):
    """Take each product for bfloat16 tensors that this processor has, the fastest or not."""
    number = ["float32", "pairs", "tiles"].index(request.param)
    if number > aft_full.half_products():
        pytest.skip(f"this processor has no product of {request.param}")
    monkeypatch.setattr(aft_full, "half_products", lambda: number)
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("B", "T", "D"), [(2, 40, 5), (1, 1100, 40), (8, 130, 150)])
def test_products_of_bfloat16(B, T, D, causal, route):
    """Check squares and blocks that are not whole, and strips that are worked on together or alone."""
    q, k, v, w = qkvw(B, T, T, D, torch.bfloat16)
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) > 0.2
    assert worst(both(functional.aft_full, (q, 4 * k, v, w), {"causal": causal, "key_mask": mask})) < 2e-2


@pytest.mark.parametrize("causal", [False, True])
def test_products_of_bfloat16_on_adversarial_keys(causal, route):
    """Check keys of +-100, late spikes and log-weights of +-60 by the contract's measure, gradients too."""
    form = partial(functional.aft_full, causal=causal)

    def call_eager(args, options):
        return form(*args, **{**options, "backend": "eager"})

    measure = Measure(partial(form, backend="cpu"), call_eager, roles(form), lambda *_: 0.0, torch.bfloat16)
    for label, case, options in adversarial_cases(qkvw(1, 200, 200, 40), {}, roles(form)):
        found = measure.compare(case, options)
        assert max(part.error for part in found.parts) <= found.tolerance, label


def test_wide_keys_meet_wide_weights_in_bfloat16(route):
    """Check that groups of rows which no product can do exactly stand beside others in one square."""
    q, k, v, w = qkvw(2, 300, 300, 35, torch.bfloat16)
    k, w = k * 4, w * 10
    k[0, 133, :5], k[1, 210, 20:] = 100.0, -300.0
    w[:100], w[200:220] = w[:100] / 50, w[200:220] * 2
    for causal in (False, True):
        assert worst(both(functional.aft_full, (q, k, v, w), {"causal": causal})) < 2e-2


def test_products_of_bfloat16_differ_in_the_order_of_sums_only(monkeypatch):
    args, options = qkvw(2, 700, 700, 70, torch.bfloat16), {"causal": True}
    if aft_full.half_products() < 2:
        pytest.skip("this processor has one such product")
    first = both(functional.aft_full, args, options)
    monkeypatch.setattr(aft_full, "half_products", lambda: 1)
    second = both(functional.aft_full, args, options)
    last_place = 2.0**-8
    assert worst([(a, b) for (a, _), (b, _) in zip(first, second, strict=True)]) <= last_place
    pairs = [(a.float(), b.float()) for (a, _), (b, _) in zip(first, second, strict=True)]
    assert max(float((a != b).float().mean()) for a, b in pairs) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [515, 1030])
def test_half_precision_over_several_blocks(T, causal, dtype):
    q, k, v, w = qkvw(2, T, T, 70, dtype)
    mask = torch.rand(2, T, generator=torch.Generator().manual_seed(1)) > 0.2
    assert worst(both(functional.aft_full, (q, 4 * k, v, w), {"causal": causal, "key_mask": mask})) < TOL[dtype]


@pytest.mark.parametrize(("T", "S"), [(5, 491), (490, 3), (130, 242)])
def test_queries_over_other_keys(T, S):
    assert worst(both(functional.aft_full, qkvw(2, T, S, 20), {})) < 1e-5


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("shapes", [((500, 7), (500, 7)), ((2, 500, 7), (500, 7)), ((2, 500, 7), (2, 500, 7))], ids=str)
def test_factors(shapes, dtype):
    q, k, v, _ = qkvw(2, 500, 500, 9, dtype)
    u1, u2 = (torch.randn(*s, generator=torch.Generator().manual_seed(i)).to(dtype) for i, s in enumerate(shapes))
    assert worst(both(factored, (q, k, v, u1, u2), {"causal": True})) < TOL[dtype]


@pytest.mark.parametrize("size", [1e4, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_huge_keys_are_finite(size, causal, dtype):
    q, k, v, w = qkvw(2, 70, 70, 5, dtype)
    leaves = [a.requires_grad_() for a in (q, k.sign() * size, v, w)]
    y = functional.aft_full(*leaves, causal=causal, backend="cpu")
    assert all(bool(a.isfinite().all()) for a in (y, *torch.autograd.grad(y.sum(), leaves)))
