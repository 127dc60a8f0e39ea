"""AFT-full on the C kernels: adversarial keys and weights, odd sizes, factors, masks, strides, half precision, threads, derivatives of derivatives."""

from __future__ import annotations

import pytest
import torch

from kernel_checks import adversarial, both, worst
from tokenmix import functional as F
from tokenmix.functional import _full_op as op

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def qkvw(B: int, T: int, S: int, D: int, dtype=torch.float32, *, batched: bool = False, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, n, D, generator=draw).to(dtype) for n in (T, S, S))
    return q, k, v, torch.randn((B, T, S) if batched else (T, S), generator=draw).to(dtype)


def factored(q, k, v, u1, u2, **options):
    return F.aft_full(q, k, v, (u1, u2), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "length"), [(8, 150), (37, 131), (1, 64), (3, 500)])
def test_adversarial_keys(dim, length, causal):
    adversarial("aft_full", {"causal": causal, "max_len": length}, dim=dim, length=length)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rank", [None, 1, 5])
def test_adversarial_keys_by_how_the_bias_is_given(rank, causal):
    adversarial("aft_full", {"causal": causal, "max_len": 100, "rank": rank}, dim=9, length=100)


@pytest.mark.parametrize("causal", [False, True])
def test_wide_keys_meet_wide_weights_across_blocks(causal):
    """Neither keys nor weights alone are narrow, in some groups of rows: both paths in one strip, over several blocks of rows and keys."""
    q, k, v, w = qkvw(2, 700, 700, 35)
    k, w = k * 4, w * 10
    k[0, 333, :5], k[1, 610, 20:] = 100.0, -300.0
    w[:300], w[500:520] = w[:300] / 50, w[500:520] * 2
    assert worst(both(F.aft_full, (q, k, v, w), {"causal": causal})) < 1e-5


def test_a_masked_key_may_hold_the_largest_weight():
    q, k, v, w = qkvw(2, 90, 90, 20)
    mask = torch.ones(2, 90, dtype=torch.bool)
    mask[0, 7] = mask[1, 11] = False
    w[:, 7] = 150.0
    w[5, 30:], w[60:, 13] = -1e4, float("-inf")
    for causal in (False, True):
        pairs = both(F.aft_full, (q, k, v, w), {"causal": causal, "key_mask": mask})
        assert worst(pairs[:4]) < 1e-5


def test_weights_above_300_count_as_300():
    q, k, v, w = qkvw(1, 60, 60, 5)
    w[3, 4], w[8, 2], w[50, 1] = 1e30, 301.0, 2000.0
    assert worst(both(F.aft_full, (q, k, v, w), {})) < 1e-5


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gate", ["sigmoid", None, "tanh"])
@pytest.mark.parametrize(("B", "T", "D", "batched"), [(2, 2, 5, False), (1, 200, 64, False), (3, 65, 70, True)])
def test_equals_eager(B, T, D, batched, gate, causal, dtype):
    assert worst(both(F.aft_full, qkvw(B, T, T, D, dtype, batched=batched), {"causal": causal, "gate": gate})) < TOL[dtype]


@pytest.mark.parametrize("causal", [False, True])
def test_one_token(causal):
    q, k, v, w = qkvw(3, 1, 1, 4)
    for a, b in both(F.aft_full, (q, k, v, w), {"causal": causal}):
        assert float((a - b).detach().abs().max()) < 1e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [511, 512, 513, 1029])
def test_lengths_around_a_block(T, causal):
    assert worst(both(F.aft_full, qkvw(1, T, T, 3), {"causal": causal})) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [515, 1030])
def test_half_precision_over_several_blocks(T, causal, dtype):
    q, k, v, w = qkvw(2, T, T, 70, dtype)
    mask = torch.rand(2, T, generator=torch.Generator().manual_seed(1)) > 0.2
    assert worst(both(F.aft_full, (q, 4 * k, v, w), {"causal": causal, "key_mask": mask})) < TOL[dtype]


@pytest.mark.parametrize(("T", "S"), [(5, 491), (490, 3), (130, 242)])
def test_queries_over_other_keys(T, S):
    assert worst(both(F.aft_full, qkvw(2, T, S, 20), {})) < 1e-5


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("shapes", [((500, 7), (500, 7)), ((2, 500, 7), (500, 7)), ((2, 500, 7), (2, 500, 7))], ids=str)
def test_factors(shapes, dtype):
    q, k, v, _ = qkvw(2, 500, 500, 9, dtype)
    u1, u2 = (torch.randn(*s, generator=torch.Generator().manual_seed(i)).to(dtype) for i, s in enumerate(shapes))
    assert worst(both(factored, (q, k, v, u1, u2), {"causal": True})) < TOL[dtype]


@pytest.mark.parametrize("causal", [False, True])
def test_masks_left_right_holes_and_whole_rows(causal):
    mask = torch.rand(4, 250, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, :170], mask[1, 80:], mask[2] = False, False, False
    q, k, v, w = qkvw(4, 250, 250, 33)
    for held in (1e30, float("nan")):  # what a masked token holds has no influence
        k, v = (torch.where(mask[..., None], a, held) for a in (k, v))
        got = both(F.aft_full, (q, k, v, w), {"causal": causal, "key_mask": mask})
        want = both(F.aft_full, (q, *(torch.where(mask[..., None], a, 0.0) for a in (k, v)), w), {"causal": causal, "key_mask": mask})
        assert worst([(a, b) for (a, _), (_, b) in zip(got, want, strict=True)]) < 1e-5
        assert got[0][0][2].eq(0).all()
        assert got[2][0][~mask].eq(0).all()


@pytest.mark.parametrize("size", [1e4, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_huge_keys_are_finite(size, causal, dtype):
    q, k, v, w = qkvw(2, 70, 70, 5, dtype)
    leaves = [a.requires_grad_() for a in (q, k.sign() * size, v, w)]
    y = F.aft_full(*leaves, causal=causal, backend="cpu")
    assert all(bool(a.isfinite().all()) for a in (y, *torch.autograd.grad(y.sum(), leaves)))


@pytest.mark.parametrize("causal", [False, True])
def test_strides_are_taken_as_they_are(causal):
    fused, w = torch.randn(2, 90, 3 * 40, generator=torch.Generator().manual_seed(0)), qkvw(1, 90, 90, 1)[3]
    for parts in (
        fused.chunk(3, -1),
        fused.transpose(1, 2).contiguous().transpose(1, 2).chunk(3, -1),
        fused.expand(2, -1, -1)[:1].expand(3, -1, -1).chunk(3, -1),
    ):
        got = F.aft_full(*parts, torch.cat([w, w], 1)[:, :90].T, causal=causal, backend="cpu")
        assert torch.equal(got, F.aft_full(*(a.contiguous() for a in parts), w.T.contiguous(), causal=causal, backend="cpu"))


@pytest.mark.parametrize("wide", [1.0, 50.0])
@pytest.mark.parametrize(("factors", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)], ids=str)
def test_one_thread_gives_the_same_bits_as_two(factors, dtype, wide):
    q, k, v, w = qkvw(2, 530, 530, 100, dtype)
    args = [a.requires_grad_() for a in (q, k * wide, v, *((w[:, :64].contiguous(), w[:, 64:128].contiguous()) if factors else (w,)))]
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        y = (factored if factors else F.aft_full)(*args, causal=True, backend="cpu")
        found.append([y, *torch.autograd.grad(y.square().sum(), args)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("factors", [False, True])
def test_the_second_derivative_is_the_eager_one(factors, causal):
    q, k, v, w = qkvw(2, 20, 20, 6)
    args = [a.requires_grad_() for a in (q, k, v, *((w[:, :3].clone(), w[:, 3:6].clone()) if factors else (w,)))]
    found = []
    for backend in ("cpu", "eager"):
        y = (factored if factors else F.aft_full)(*args, causal=causal, backend=backend)
        first = torch.autograd.grad(y.square().sum(), args, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), args))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factors", [False, True])
def test_the_operators_pass_opcheck(factors):
    q, k, v, w = (a.requires_grad_() for a in qkvw(2, 30, 30, 5))
    pair = (w.detach()[None, :, :4].clone().requires_grad_(), w.detach()[None, :, 4:8].clone().requires_grad_()) if factors else (w[None].detach(), None)
    torch.library.opcheck(op._forward, (q, k, v, *pair, None, True, True))
    kept = [a.detach() for a in op._forward(q, k, v, *pair, None, False, True)[1:]]
    torch.library.opcheck(op._backward, (torch.randn_like(q), q, k, v, *pair, None, *kept, False))  # traces the eager form, which is longer when causal


def test_compiles_whole():
    args = [a.requires_grad_() for a in qkvw(2, 70, 70, 5)]
    run = torch.compile(lambda *a: F.aft_full(*a, causal=True, backend="cpu"), fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(*args).square().sum(), args) for f in (run, lambda *a: F.aft_full(*a, causal=True, backend="cpu")))
    assert all(torch.allclose(a, b) for a, b in zip(got, want, strict=True))
