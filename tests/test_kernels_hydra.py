"""Hydra on the C kernels: adversarial keys, long and short tokens, odd sizes, masks, strides, half precision, threads, derivatives of derivatives."""

from __future__ import annotations

import pytest
import torch

from kernel_checks import adversarial, both, worst
from tokenmix import functional as F
from tokenmix.functional import _hydra_op as op
from tokenmix.functional.sums.kernel_attention import MAPS

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def qkv(B: int, T: int, S: int, D: int, dtype=torch.float32, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, n, D, generator=draw).to(dtype) for n in (T, S, S))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "length"), [(8, 150), (67, 131), (3, 64), (130, 65)])
def test_adversarial_keys(dim, length, causal):
    adversarial("hydra", {"causal": causal}, dim=dim, length=length)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["identity", "mean", "tanh", "elu/cosine", "sigmoid/softmax", "softmax/cosine", "identity/softmax"])
def test_adversarial_keys_of_other_maps(feature, causal):
    adversarial("hydra", {"causal": causal, "feature": feature}, dim=20, length=131)


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("B", "T", "D"), [(1, 1, 3), (2, 1, 5), (1, 200, 64), (3, 65, 70)])
def test_equals_eager(B, T, D, normalise, causal, dtype):
    assert worst(both(F.hydra, qkv(B, T, T, D, dtype), {"causal": causal, "normalise": normalise})) < TOL[dtype]


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", [*MAPS, "cosine/identity", "tanh/cosine", "elu/softmax", "cosine/mean"])
def test_every_map_equals_eager(feature, causal, dtype):
    assert worst(both(F.hydra, qkv(2, 70, 70, 17, dtype), {"causal": causal, "feature": feature})) < TOL[dtype]


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("feature", ["cosine", "identity", "elu", "sigmoid/softmax"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_left_right_holes_and_whole_rows(causal, feature, normalise):
    mask = torch.rand(4, 150, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, :70], mask[1, 80:], mask[2] = False, False, False
    q, k, v = qkv(4, 150, 150, 33)
    for hidden in (1e30, float("nan")):  # what a masked token holds has no influence
        k, v = (torch.where(mask[..., None], a, hidden) for a in (k, v))
        options = {"causal": causal, "key_mask": mask, "feature": feature, "normalise": normalise and "softmax" not in feature}
        pairs = both(F.hydra, (q, k, v), options)
        assert worst(pairs) < 1e-5
        assert pairs[0][0][2].eq(0).all()
        assert pairs[2][0][~mask].eq(0).all()
        assert pairs[3][0][~mask].eq(0).all()


@pytest.mark.parametrize("normalise", [False, True])
def test_queries_over_other_keys(normalise):
    mask = torch.rand(2, 91, generator=torch.Generator().manual_seed(1)) > 0.4
    for key_mask in (None, mask):
        assert worst(both(F.hydra, qkv(2, 5, 91, 20), {"normalise": normalise, "key_mask": key_mask})) < 1e-5
    assert worst(both(F.hydra, qkv(2, 200, 3, 20), {"normalise": normalise})) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e4, 1e15, 1e19, 1e30])
def test_tokens_of_any_size_keep_their_direction(size, causal):
    q, k, v = qkv(2, 70, 70, 40)
    long = torch.where(torch.arange(70)[:, None] % 3 == 0, size, 1.0)
    assert worst(both(F.hydra, (q * long, k * long, v), {"causal": causal})[:1]) < 1e-5
    assert worst(both(F.hydra, (q * size, k * size, v), {"causal": causal, "eps": 1e-30})) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_of_zeros_without_eps(causal):
    q, k, v = qkv(2, 70, 70, 40)
    q[:, 5], k[:, 7], k[0] = 0.0, 0.0, 1e-30
    leaves = [a.requires_grad_() for a in (q, k, v)]
    y = F.hydra(*leaves, eps=0.0, causal=causal, backend="cpu")
    assert y[:, 5].eq(0).all()
    assert all(bool(a.isfinite().all()) for a in (y, *torch.autograd.grad(y.sum(), leaves)))


@pytest.mark.parametrize("causal", [False, True])
def test_strides_are_taken_as_they_are(causal):
    fused = torch.randn(2, 90, 3 * 40, generator=torch.Generator().manual_seed(0))
    for parts in (
        fused.chunk(3, -1),
        fused.transpose(1, 2).contiguous().transpose(1, 2).chunk(3, -1),
        fused.expand(2, -1, -1)[:1].expand(3, -1, -1).chunk(3, -1),
    ):
        whole = [a.contiguous() for a in parts]
        assert torch.equal(F.hydra(*parts, causal=causal, backend="cpu"), F.hydra(*whole, causal=causal, backend="cpu"))


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_one_thread_gives_the_same_bits_as_two(causal, dtype, normalise):
    args = [a.requires_grad_() for a in qkv(3, 300, 300, 101, dtype)]
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        y = F.hydra(*args, causal=causal, normalise=normalise, backend="cpu")
        found.append([y, *torch.autograd.grad(y.square().sum(), args)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sum_of_equal_terms_does_not_drift(causal):
    x = torch.full((1, 20_000, 3), 0.1)
    y = F.hydra(x, x, x, causal=causal, feature="identity", normalise=True, backend="cpu")
    assert float((y / 1e-3 - 1).abs().max()) < 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_the_second_derivative_is_the_eager_one(causal):
    args = [a.requires_grad_() for a in qkv(2, 20, 20, 6)]
    found = []
    for backend in ("cpu", "eager"):
        first = torch.autograd.grad(F.hydra(*args, causal=causal, backend=backend).square().sum(), args, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), args))
    for a, b in zip(*found, strict=True):
        assert float((a - b).detach().abs().max() / b.detach().abs().max()) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_the_operators_pass_opcheck(causal):
    q, k, v = (a.requires_grad_() for a in qkv(2, 70, 70, 5))
    options = (causal, True, False, 1e-6, True)
    torch.library.opcheck(op._forward, (q, k, v, None, *options, True))
    saved = op._forward(q, k, v, None, *options, True)[1].detach()
    torch.library.opcheck(op._backward, (torch.randn_like(q), q, k, v, None, saved, *options))


@pytest.mark.parametrize("feature", ["cosine", "elu"])
def test_compiles_whole(feature):
    args = [a.requires_grad_() for a in qkv(2, 70, 70, 5)]

    def form(*a):
        return F.hydra(*a, causal=True, feature=feature, backend="cpu")

    run = torch.compile(form, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(*args).square().sum(), args) for f in (run, form))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want, strict=True))
