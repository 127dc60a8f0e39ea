"""External attention on the C kernels: adversarial logits, odd sizes, masks, half precision, threads, derivatives of derivatives."""

from __future__ import annotations

import pytest
import torch

from kernel_checks import adversarial, both, worst
from tokenmix import MixerError
from tokenmix import functional as F
from tokenmix.functional import _external_op as op

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def parts(B: int, T: int, D: int, heads: int, slots: int, dtype=torch.float32, size: float = 1.0):
    draw = torch.Generator().manual_seed(0)
    shapes = (B, T, D), (slots, D // heads), (slots, D // heads), (slots,), (D // heads,)
    x, *rest = (torch.randn(s, generator=draw) for s in shapes)
    return tuple(a.to(dtype) for a in (x * size, *rest))


@pytest.mark.parametrize("norm", ["double", "tokens"])
@pytest.mark.parametrize(("dim", "length", "slots"), [(8, 150, 5), (40, 65, 33), (6, 1, 1)])
def test_adversarial_keys(dim, length, slots, norm):
    adversarial("external", {"slots": slots, "norm": norm}, dim=dim, length=length)


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("norm", ["double", "tokens"])
@pytest.mark.parametrize(("B", "T", "D", "heads", "slots"), [(2, 5, 6, 2, 3), (1, 200, 16, 1, 64), (3, 65, 12, 3, 37)])
def test_equals_eager(B, T, D, heads, slots, norm, dtype):
    assert worst(both(F.external, parts(B, T, D, heads, slots, dtype), {"heads": heads, "norm": norm})) < TOL[dtype]


@pytest.mark.parametrize("norm", ["double", "tokens"])
@pytest.mark.parametrize("eps", [0.0, 1e-9])
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_no_slot_and_no_token_is_zero_over_zero(size, eps, norm):
    leaves = [a.requires_grad_() for a in parts(2, 130, 12, 2, 9, size=size)]
    y = F.external(*leaves, heads=2, norm=norm, eps=eps, backend="cpu")
    assert all(bool(a.isfinite().all()) for a in (y, *torch.autograd.grad(y.sum(), leaves)))


@pytest.mark.parametrize("norm", ["double", "tokens"])
def test_masks_left_right_holes_and_whole_rows(norm):
    mask = torch.rand(4, 150, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, :70], mask[1, 80:], mask[2] = False, False, False
    x, *rest = parts(4, 150, 12, 2, 9)
    for hidden in (1e30, float("nan")):  # what a masked token holds has no influence
        x = torch.where(mask[..., None], x, hidden)
        pairs = both(F.external, (x, *rest), {"heads": 2, "norm": norm, "key_mask": mask})
        assert worst(pairs) < 1e-5
        assert pairs[0][0][~mask].eq(0).all()
        assert pairs[1][0][~mask].eq(0).all()


def test_one_thread_gives_the_same_bits_as_two():
    logits = torch.randn(3, 300, 2, 37, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        w = op.external_weights(logits, None, norm="double", eps=1e-9)
        found.append([w, *torch.autograd.grad(w.square().sum(), logits)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_the_second_derivative_is_the_eager_one():
    args = [a.requires_grad_() for a in parts(2, 20, 6, 2, 5)]
    found = []
    for backend in ("cpu", "eager"):
        first = torch.autograd.grad(F.external(*args, heads=2, backend=backend).square().sum(), args, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), args))
    largest = max(float(a.detach().abs().max()) for a in found[1])  # that of the first bias, which shifts all tokens alike, is 0
    assert all(float((a - b).detach().abs().max()) < 1e-5 * largest for a, b in zip(*found, strict=True))


def test_the_operators_pass_opcheck():
    logits = torch.randn(2, 70, 2, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.library.opcheck(op._forward, (logits, None, "double", 1e-9))
    w, level = (a.detach() for a in op._forward(logits, None, "double", 1e-9))
    torch.library.opcheck(op._backward, (torch.randn_like(w), logits, None, w, level, "double", 1e-9))


def test_compiles_whole():
    args = [a.requires_grad_() for a in parts(2, 70, 6, 2, 5)]

    def form(*a):
        return F.external(*a, heads=2, backend="cpu")

    run = torch.compile(form, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(*args).square().sum(), args) for f in (run, form))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want, strict=True))


def test_what_the_kernel_lacks_stays_on_the_eager_form():
    args = parts(1, 5, 4, 2, 3)
    for lacking in ({"causal": True}, {"norm": "slots"}):
        with pytest.raises(MixerError, match="no causal form|slots"):
            F.external(*args, heads=2, backend="cpu", **lacking)
        assert torch.equal(F.external(*args, heads=2, **lacking), F.external(*args, heads=2, backend="eager", **lacking))
