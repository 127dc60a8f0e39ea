"""Test AFT-local and AFT-conv on the C kernels.

Adversarial keys, odd sizes, masks, strides, half precision, threads, derivatives of derivatives.
"""

from __future__ import annotations

import pytest
import torch

from kernel_checks import adversarial, worst
from tokenmix import functional
from tokenmix.functional.sums.band import band_of

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def qkv(B: int, T: int, D: int, dtype=torch.float32, h: int | None = None, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, T, n, generator=draw).to(dtype) for n in (D, h or D, D))


def local(q, k, v, w, **options):
    return functional.aft_local(q, k, v, w, **options)


def local_factors(q, k, v, a, b, **options):
    return functional.aft_local(q, k, v, (a, b), **options)


def arguments(name: str, B: int, T: int, D: int, dtype=torch.float32, window: int = 7, seed: int = 0):
    """The functional form, its tensors and options, for each kind of log-weights."""
    draw = torch.Generator().manual_seed(seed + 1)
    if name == "conv":
        h = next(n for n in (3, 2, 5, 1) if D % n == 0)
        taps = torch.randn(h, window // 2 * 2 + 1, generator=draw).to(dtype)
        return functional.aft_conv, (*qkv(B, T, D, dtype, h, seed), taps), {}
    if name == "factors":
        factors = tuple(torch.randn(T, 4, generator=draw).to(dtype) / 2 for _ in range(2))
        return local_factors, (*qkv(B, T, D, dtype, seed=seed), *factors), {"window": window}
    shape = (B, T, T) if name == "batched" else (T, T)
    return local, (*qkv(B, T, D, dtype, seed=seed), torch.randn(shape, generator=draw).to(dtype)), {"window": window}


KINDS = ["matrix", "batched", "factors", "conv"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "length", "window"), [(8, 150, 5), (70, 131, 33), (1, 64, 200), (8, 61, 61)])
def test_adversarial_keys_local(dim, length, window, causal):
    adversarial("aft_local", {"causal": causal, "window": window, "rank": 4, "max_len": length}, dim=dim, length=length)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "length", "heads", "size"), [(8, 61, 2, 5), (70, 40, 1, 33), (1, 33, 1, 101)])
def test_adversarial_keys_conv(dim, length, heads, size, causal):
    adversarial(
        "aft_conv", {"causal": causal, "heads": heads, "kernel_size": size, "reparam": False}, dim=dim, length=length
    )


def literal(q, k, v, w, causal: bool):
    """Every row under its own maximum, in float64: w (h, T, T) with heads of k or one head."""
    T, h = w.shape[-1], w.shape[0]
    mask = torch.ones(T, T, dtype=torch.bool)
    parts = zip(*(a.chunk(h, -1) for a in (q, k, v)), w, strict=True)
    mask = mask.tril() if causal else mask
    return torch.cat(
        [functional.aft_full(a, b.expand_as(a), c, w_, attn_mask=mask, backend="eager") for a, b, c, w_ in parts], -1
    )


def dense(kind: str, w, window: int, causal: bool, T: int):
    """The log-weights (h, T, T) of all pairs."""
    offset = torch.arange(T) - torch.arange(T)[:, None]
    if kind == "conv":
        low = w.shape[-1] - 1 if causal else w.shape[-1] // 2
        inside = (offset >= -low) & (offset < w.shape[-1] - low)
        return torch.where(inside, w[:, (offset + low).clamp(0, w.shape[-1] - 1)], 0.0)
    return torch.where(offset.abs() < window, w, 0.0)[None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["matrix", "conv"])
@pytest.mark.parametrize(("size", "low"), [(90.0, -200.0), (500.0, -1e4), (30.0, 400.0), (100.0, 60.0), (1e4, 0.0)])
def test_ranges_beyond_float32_are_summed_exactly(size, low, kind, causal):
    """Check what neither the carried sums nor one block can hold.

    Keys far apart, weights that hide the largest ones, weights above the cap.
    """
    form, (q, k, v, w), options = arguments(kind, 2, 190, 6, window=41)
    k = (k.sign() * size * torch.rand(k.shape, generator=torch.Generator().manual_seed(4))).round(decimals=1)
    w = torch.where(w > 0, torch.full_like(w, low), w)
    leaves = [a.requires_grad_() for a in (q, k, v, w)]
    exact = [a.detach().double().requires_grad_() for a in leaves]
    y = form(*leaves, **options, causal=causal, backend="cpu")
    want = literal(*exact[:3], dense(kind, exact[3], 41, causal, 190).clamp_max(300.0), causal)
    pairs = [
        (y, want),
        *zip(
            torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(want.square().sum(), exact), strict=True
        ),
    ]
    assert worst(pairs) < 1e-5, [worst([p]) for p in pairs]


def test_a_long_sum_of_equal_terms_does_not_drift():
    v = torch.full((1, 20_000, 3), 0.1)
    for causal in (False, True):
        y = functional.aft_conv(
            v, torch.zeros_like(v)[..., :1], v, torch.ones(1, 3), causal=causal, gate=None, backend="cpu"
        )
        assert float((y - 0.1).abs().max()) < 2e-7


def test_a_row_does_not_feel_what_comes_later():
    form, (q, k, v, w), options = arguments("matrix", 1, 150, 5)
    y = form(q, k, v, w, **options, causal=True, backend="cpu")
    later = torch.cat([k[:, :100], torch.full_like(k[:, 100:], 1e4)], 1)
    changed = form(q, later, v, w, **options, causal=True, backend="cpu")
    assert torch.allclose(y[:, :100], changed[:, :100], rtol=1e-5, atol=1e-6)


def test_the_band_of_factors_is_that_of_their_product():
    for T, window in ((1, 1), (5, 9), (40, 3), (70, 33)):
        u, v = (torch.randn(2, T, 3, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
        for causal in (False, True):
            low = min(window, T) - 1
            inside = torch.arange(T)[:, None] + torch.arange(low + 1 if causal else 2 * low + 1) - low
            inside = (inside >= 0) & (inside < T)
            a, b = band_of((u, v), window, causal), band_of(u @ v.transpose(1, 2), window, causal)
            assert a.shape == b.shape == (2, 1, *inside.shape)
            assert torch.allclose(a[:, 0][:, inside], b[:, 0][:, inside], atol=1e-5)


def test_what_the_kernels_lack_is_said():
    form, args, options = arguments("matrix", 1, 8, 4)
    with pytest.raises(functional.aft.MixerError, match="outside='zero' only"):
        form(*args, **options, outside="none", backend="cpu")
