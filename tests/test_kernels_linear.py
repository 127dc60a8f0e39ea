"""Linear attention on the C kernels: adversarial keys, odd sizes, masks, strides, half precision, threads, derivatives of derivatives."""

from __future__ import annotations

import pytest
import torch

from kernel_checks import adversarial, both, worst
from tokenmix import MixerError
from tokenmix import functional as F
from tokenmix.functional import _linear_op as op

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def qkv(B: int, T: int, S: int, D: int, dtype=torch.float32, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, n, D, generator=draw).to(dtype) for n in (T, S, S))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["elu", "exp", "softmax"])
@pytest.mark.parametrize(("dim", "heads", "length"), [(8, 2, 150), (66, 2, 131), (3, 3, 65), (40, 1, 1)])
def test_adversarial_keys(dim, heads, length, feature, causal):
    adversarial("linear", {"heads": heads, "causal": causal, "feature": feature}, dim=dim, length=length)


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["elu", "softmax"])
@pytest.mark.parametrize(("B", "T", "D", "heads"), [(1, 1, 4, 1), (2, 5, 6, 2), (1, 200, 64, 1), (3, 65, 70, 2), (1, 130, 264, 2)])
def test_equals_eager(B, T, D, heads, feature, causal, dtype):
    q, k, v = qkv(B, T, T, D, dtype)
    if T == 1:
        pairs = both(F.linear_attention, (q, k, v), {"heads": heads, "causal": causal, "feature": feature})
        pairs = [pairs[0], pairs[3]]  # one key has all the weight whatever it is: the other gradients are 0
    else:
        pairs = both(F.linear_attention, (q, k, v), {"heads": heads, "causal": causal, "feature": feature})
    assert worst(pairs) < TOL[dtype]


@pytest.mark.parametrize("causal", [False, True])
def test_jumps_within_blocks_are_done_token_by_token(causal):
    """Keys that rise by hundreds inside one block: sums under the units of its end would lose all that came before."""
    q, k, v = qkv(2, 200, 200, 16)
    k = k + torch.where(torch.arange(200) < 90, -120.0, 0.0)[:, None] + torch.where(torch.arange(200) >= 170, 80.0, 0.0)[:, None]
    options = {"heads": 2, "causal": causal, "feature": "exp"}
    pairs = both(F.linear_attention, (q, k, v), options)
    assert worst(pairs) < 1e-5
    saved = op._forward(q, k, v, None, 2, False, causal, True)[1]
    assert not causal or saved[..., 200:].tolist() == [[[0.0, 1.0, 1.0, 0.0]] * 2] * 2


@pytest.mark.parametrize("feature", ["elu", "exp", "softmax"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_left_right_holes_and_whole_rows(causal, feature):
    mask = torch.rand(4, 150, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, :70], mask[1, 80:], mask[2] = False, False, False
    q, k, v = qkv(4, 150, 150, 34)
    for hidden in (1e30, float("nan")):  # what a masked token holds has no influence
        k, v = (torch.where(mask[..., None], a, hidden) for a in (k, v))
        pairs = both(F.linear_attention, (q, k, v), {"heads": 2, "causal": causal, "key_mask": mask, "feature": feature})
        assert worst(pairs) < 1e-5
        assert pairs[0][0][2].eq(0).all()
        assert pairs[2][0][~mask].eq(0).all()
        assert pairs[3][0][~mask].eq(0).all()


def test_queries_over_other_keys():
    mask = torch.rand(2, 91, generator=torch.Generator().manual_seed(1)) > 0.4
    for key_mask in (None, mask):
        assert worst(both(F.linear_attention, qkv(2, 5, 91, 20), {"heads": 2, "key_mask": key_mask})) < 1e-5
    assert worst(both(F.linear_attention, qkv(2, 200, 3, 20), {"heads": 2})) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["elu", "exp"])
def test_finite_at_large_keys(feature, causal):
    for size in (1e3, 1e4, 1e6):
        args = [(a * s).requires_grad_() for a, s in zip(qkv(1, 130, 130, 8), (1.0, size, 1.0), strict=True)]
        y = F.linear_attention(*args, heads=2, causal=causal, feature=feature, backend="cpu")
        assert all(bool(a.isfinite().all()) for a in (y, *torch.autograd.grad(y.sum(), args)))


@pytest.mark.parametrize("causal", [False, True])
def test_strides_are_taken_as_they_are(causal):
    fused = torch.randn(2, 90, 3 * 40, generator=torch.Generator().manual_seed(0))
    for parts in (
        fused.chunk(3, -1),
        fused.transpose(1, 2).contiguous().transpose(1, 2).chunk(3, -1),
        fused.expand(2, -1, -1)[:1].expand(3, -1, -1).chunk(3, -1),
    ):
        whole = [a.contiguous() for a in parts]
        got, want = (F.linear_attention(*a, heads=2, causal=causal, backend="cpu") for a in (parts, whole))
        assert torch.equal(got, want)


@pytest.mark.parametrize("causal", [False, True])
def test_one_thread_gives_the_same_bits_as_two(causal):
    args = [a.requires_grad_() for a in qkv(3, 300, 300, 66)]
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        y = F.linear_attention(*args, heads=3, causal=causal, backend="cpu")
        found.append([y, *torch.autograd.grad(y.square().sum(), args)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sum_of_equal_terms_does_not_drift(causal):
    x = torch.full((1, 20_000, 3), 0.1)
    y = F.linear_attention(x, x, x, heads=1, causal=causal, backend="cpu")
    assert float((y / 0.1 - 1).abs().max()) < 3e-6  # the 64 terms of a block are rounded alike; what grows with the length is far above


@pytest.mark.parametrize("causal", [False, True])
def test_the_second_derivative_is_the_eager_one(causal):
    args = [a.requires_grad_() for a in qkv(2, 20, 20, 6)]
    found = []
    for backend in ("cpu", "eager"):
        first = torch.autograd.grad(F.linear_attention(*args, heads=2, causal=causal, backend=backend).square().sum(), args, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), args))
    for a, b in zip(*found, strict=True):
        assert float((a - b).detach().abs().max() / b.detach().abs().max()) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_the_operators_pass_opcheck(causal):
    q, k, v = (a.requires_grad_() for a in qkv(2, 70, 70, 6))
    torch.library.opcheck(op._forward, (q, k, v, None, 2, True, causal, True))
    y, saved = (a.detach() for a in op._forward(q, k, v, None, 2, True, causal, True))
    torch.library.opcheck(op._backward, (torch.randn_like(q), q, k, v, None, y, saved, 2, True, causal))


@pytest.mark.parametrize("feature", ["elu", "softmax"])
def test_compiles_whole(feature):
    args = [a.requires_grad_() for a in qkv(2, 70, 70, 6)]

    def form(*a):
        return F.linear_attention(*a, heads=2, causal=True, feature=feature, backend="cpu")

    run = torch.compile(form, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(*args).square().sum(), args) for f in (run, form))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want, strict=True))


def test_features_that_may_be_zero_stay_on_the_eager_form():
    q, k, v = qkv(1, 5, 5, 4)
    with pytest.raises(MixerError, match="relu"):
        F.linear_attention(q, k, v, heads=2, feature="relu", backend="cpu")
    assert torch.equal(F.linear_attention(q, k, v, heads=2, feature="relu"), F.linear_attention(q, k, v, heads=2, feature="relu", backend="eager"))
