"""AFT-simple on the C kernels: adversarial keys, odd sizes, masks, strides, half precision, threads, derivatives of derivatives."""

from __future__ import annotations

import pytest
import torch

from kernel_checks import adversarial, both, worst
from tokenmix import functional as F
from tokenmix.functional import _aft_simple_op as op
from tokenmix.testing import inputs

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def qkv(B: int, T: int, S: int, D: int, dtype=torch.float32, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, n, D, generator=draw).to(dtype) for n in (T, S, S))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "length"), [(8, 150), (67, 131), (1, 64), (130, 65)])
def test_adversarial_keys(dim, length, causal):
    adversarial("aft_simple", {"causal": causal}, dim=dim, length=length)


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gate", ["sigmoid", None, "tanh"])
@pytest.mark.parametrize(("B", "T", "D"), [(1, 1, 1), (2, 1, 5), (1, 200, 64), (3, 65, 70)])
def test_equals_eager(B, T, D, gate, causal, dtype):
    assert worst(both(F.aft_simple, qkv(B, T, T, D, dtype), {"causal": causal, "gate": gate})) < TOL[dtype]


@pytest.mark.parametrize("causal", [False, True])
def test_masks_left_right_holes_and_whole_rows(causal):
    mask = torch.rand(4, 150, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, :70], mask[1, 80:], mask[2] = False, False, False
    q, k, v = qkv(4, 150, 150, 33)
    k, v = (torch.where(mask[..., None], a, 1e30) for a in (k, v))  # what a masked token holds has no influence
    pairs = both(F.aft_simple, (q, k, v), {"causal": causal, "key_mask": mask})
    assert worst(pairs) < 1e-5
    assert pairs[0][0][2].eq(0).all()
    assert pairs[2][0][~mask].eq(0).all()


def test_queries_over_other_keys():
    assert worst(both(F.aft_simple, qkv(2, 5, 91, 20), {})) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_strides_are_taken_as_they_are(causal):
    fused = torch.randn(2, 90, 3 * 40, generator=torch.Generator().manual_seed(0))
    for parts in (
        fused.chunk(3, -1),
        fused.transpose(1, 2).contiguous().transpose(1, 2).chunk(3, -1),
        fused.expand(2, -1, -1)[:1].expand(3, -1, -1).chunk(3, -1),
    ):
        whole = [a.contiguous() for a in parts]
        assert torch.equal(F.aft_simple(*parts, causal=causal, backend="cpu"), F.aft_simple(*whole, causal=causal, backend="cpu"))


@pytest.mark.parametrize("causal", [False, True])
def test_masks_may_have_strides(causal):
    q, k, v = qkv(3, 70, 70, 9)
    wide = torch.rand(3, 140, generator=torch.Generator().manual_seed(0)) > 0.5
    for mask in (wide[:, ::2], wide[:, :70].T.contiguous().T, wide[:1, 70:].expand(3, -1)):
        given = {"causal": causal, "backend": "cpu"}
        assert torch.equal(F.aft_simple(q, k, v, key_mask=mask, **given), F.aft_simple(q, k, v, key_mask=mask.clone().contiguous(), **given))


@pytest.mark.parametrize("causal", [False, True])
def test_one_thread_gives_the_same_bits_as_two(causal):
    args = [a.requires_grad_() for a in qkv(2, 300, 300, 100)]
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        y = F.aft_simple(*args, causal=causal, backend="cpu")
        found.append([y, *torch.autograd.grad(y.square().sum(), args)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_long_sum_of_equal_terms_does_not_drift():
    v = torch.full((1, 20_000, 3), 0.1)
    y = F.aft_simple(v, torch.zeros_like(v), v, causal=True, gate=None, backend="cpu")
    assert float((y - 0.1).abs().max()) < 1e-7  # 2.6e-7 with totals in float32


@pytest.mark.parametrize("pattern", ["normal", "uniform", "ramp down", "alternating"])
def test_gradients_do_not_drift_over_a_long_sequence(pattern):
    """Products of ratios of denominators, which are all nearly 1, would be 3e-5 off here."""
    shape = (1, 8192, 4)
    keys = inputs.KEYS[pattern](shape, 0, 100.0).float()
    assert worst(both(F.aft_simple, (qkv(*shape[:2], *shape[1:])[0], keys, inputs.noise(*shape, seed=1).float()), {"causal": True})) < 2e-6


@pytest.mark.parametrize("causal", [False, True])
def test_the_second_derivative_is_the_eager_one(causal):
    args = [a.requires_grad_() for a in qkv(2, 20, 20, 6)]
    found = []
    for backend in ("cpu", "eager"):
        first = torch.autograd.grad(F.aft_simple(*args, causal=causal, backend=backend).square().sum(), args, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), args))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_operators_pass_opcheck(causal):
    q, k, v = (a.requires_grad_() for a in qkv(2, 70, 70, 5))
    torch.library.opcheck(op._forward, (q, k, v, None, 70, causal, True))
    saved = op._forward(q, k, v, None, 70, causal, True)[1].detach()
    torch.library.opcheck(op._backward, (torch.randn_like(q), q, k, v, None, saved, causal))


def test_compiles_whole():
    args = [a.requires_grad_() for a in qkv(2, 70, 70, 5)]
    run = torch.compile(lambda *a: F.aft_simple(*a, causal=True, backend="cpu"), fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(*args).square().sum(), args) for f in (run, lambda *a: F.aft_simple(*a, causal=True, backend="cpu")))
    assert all(torch.allclose(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_precision_number_is_read_and_rounded(dtype):
    """One token gives back its value; of two equal keys comes the mean of two values, neighbours above all, rounded as torch rounds."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    v = every[every.isfinite()][None, None]
    y = F.aft_simple(v, v * 0, v, gate=None, causal=True, backend="cpu")
    assert torch.equal(y, v)
    v = v[v.abs() < 1e38][None, None]  # the sum of two is finite
    for other in (v.roll(1, -1), v.roll(7, -1)):
        y = F.aft_simple(v.expand(1, 2, -1), torch.zeros(1, 2, v.shape[-1], dtype=dtype), torch.cat([v, other], 1), gate=None, backend="cpu")
        assert torch.equal(y[:, :1], ((v.double() + other.double()) / 2).to(dtype))
