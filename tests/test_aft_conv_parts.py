"""Test AFT-conv without its parts: signed filters, no normaliser, nothing outside; without all three it convolves."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tokenmix import MixerError, build_mixer, functional
from tokenmix.lab.explain.families import family
from tokenmix.lab.report.biases import filters as drawn
from tokenmix.mixers import Inputs
from tokenmix.models.one_hot import OneHotConv

OPTIONS = [
    {"filters": f, "divide": d, "outside": o} for f, d, o in product(("exp", "signed"), (True, False), ("zero", "none"))
]


def qkv(T: int, heads: int, D: int = 8) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, T, n, generator=make, dtype=torch.float64) for n in (D, heads, D)]


def taps(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_without_all_three_parts_it_is_a_depthwise_convolution_of_exp_k_v():
    q, k, v = qkv(20, 8)
    kernel = taps(8, 3, 3)
    images = (torch.exp(k) * v).mT.unflatten(2, (4, 5))
    want = F.conv2d(images, kernel[:, None], padding=1, groups=8).flatten(2).mT
    free = {"filters": "signed", "outside": "none", "divide": False}
    same(functional.aft_conv(q, k, v, kernel, grid=(4, 5), gate=None, **free), want)


def test_signed_filters_add_a_convolution_to_the_sums_of_aft_simple():
    q, k, v = qkv(12, 8)
    kernel, e = taps(8, 5), torch.exp(k)
    local = F.conv1d((e * v).mT, kernel[:, None], padding=2, groups=8).mT
    want = ((e * v).sum(1, keepdim=True) + local) / e.sum(1, keepdim=True)
    same(functional.aft_conv(q, k, v, kernel, filters="signed", gate=None), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("outside", ["zero", "none"])
def test_the_ratio_is_the_numerator_of_values_over_that_of_ones(outside, causal):
    q, k, v = qkv(40, 2)
    kernel, given = taps(2, 5), {"outside": outside, "causal": causal, "gate": None}
    num, den = (functional.aft_conv(q, k, a, kernel, divide=False, **given) for a in (v, torch.ones_like(v)))
    same(functional.aft_conv(q, k, v, kernel, **given), num / den)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_windowed_form_is_that_of_all_pairs(options, causal):
    q, k, v = qkv(37, 2)
    mask = torch.rand(2, 37, generator=torch.Generator().manual_seed(2)) > 0.3
    given = {**options, "causal": causal, "key_mask": mask}
    at = torch.arange(37).expand(2, -1)
    kernel = taps(2, 7)
    same(functional.aft_conv(q, k, v, kernel, **given), functional.aft_conv(q, k, v, kernel, positions=at, **given))


@pytest.mark.parametrize("outside", ["zero", "none"])
@pytest.mark.parametrize("grid", [None, (6, 10)])
def test_signed_ratios_are_exact_for_any_keys(outside, grid):
    """The largest key is outside of the window of the first rows, which would be 0/0 under one maximum."""
    q, k, v = qkv(60, 2)
    k[:, -1] = 1e4
    kernel = taps(2, 3) if grid is None else taps(2, 3, 3)
    given = {"filters": "signed", "outside": outside, "gate": None, "grid": grid}
    y = functional.aft_conv(q.float(), k.float(), v.float(), kernel.float(), **given)
    assert y.isfinite().all()
    if outside == "none":
        k[:, -1] = 0.0
        plain = functional.aft_conv(q, k, v, kernel, **given)
        torch.testing.assert_close(y[:, :40], plain[:, :40].float(), rtol=1e-5, atol=1e-5)


def test_filters_may_be_zero_and_still_learn():
    for outside, first in (("zero", 0.0), ("none", 1.0)):
        mixer = build_mixer("aft_conv", 8, heads=2, kernel_size=3, filters="signed", outside=outside)
        assert (mixer.kernel() == first).all()
        mixer(torch.randn(2, 9, 8)).square().sum().backward()
        assert mixer.beta.grad.abs().min() > 0
        assert mixer.gamma.grad.isfinite().all()


def test_a_signed_layer_starts_as_the_one_with_exponentials():
    for outside in ("zero", "none"):
        spec = {"heads": 2, "kernel_size": 3, "outside": outside}
        mixers = [build_mixer("aft_conv", 8, **spec, filters=kind) for kind in ("exp", "signed")]
        weights = {name: p for name, p in mixers[0].state_dict().items() if name != "beta"}
        mixers[1].load_state_dict(weights, strict=False)
        x = torch.randn(2, 9, 8)
        torch.testing.assert_close(mixers[0](x), mixers[1](x))


@pytest.mark.parametrize("options", [{"filters": "signed"}, {"divide": False}])
def test_kernels_are_refused_not_used(options):
    q, k, v = (a.float() for a in qkv(20, 2))
    kernel = taps(2, 3).float()
    with pytest.raises(MixerError, match="its kernels take only filters='exp' with divide=True"):
        functional.aft_conv(q, k, v, kernel, backend="cpu", **options)
    auto, eager = (functional.aft_conv(q, k, v, kernel, backend=b, **options) for b in ("auto", "eager"))
    assert torch.equal(auto, eager)


def test_what_makes_no_sense_is_refused():
    spec = {"heads": 2, "kernel_size": 3}
    with pytest.raises(MixerError, match="AFTConv.*filters.*'relu'"):
        build_mixer("aft_conv", 8, **spec, filters="relu")
    with pytest.raises(MixerError, match="AFTConv.*divide"):
        build_mixer("aft_conv", 8, **spec, divide=None)
    with pytest.raises(MixerError, match="holds log-weights: it needs filters='exp', got 'signed'"):
        build_mixer("aft_conv", 8, **spec, filters="signed", bias={"name": "kerple"})
    q, k, v = qkv(5, 2)
    with pytest.raises(MixerError, match="aft_conv: filters='relu'; choose 'exp' or 'signed'"):
        functional.aft_conv(q, k, v, taps(2, 3), filters="relu")
    with pytest.raises(MixerError, match="OneHotConv.*filters='exp' and divide=True"):
        OneHotConv(build_mixer("aft_conv", 8, **spec, filters="signed"))


def test_pages_show_signed_taps_themselves():
    mixer = build_mixer("aft_conv", 8, heads=2, kernel_size=3, filters="signed", reparam=False)
    assert torch.equal(drawn(mixer), mixer.kernel().double())
    x = torch.randn(1, 5, 8)
    args, options = mixer.functional_args(Inputs(x))
    assert family(mixer, (x, None), args, options).key == "other"
