"""Test External attention on the C kernels.

Adversarial logits, odd sizes, masks, half precision, threads, derivatives of derivatives.
"""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError, functional
from tokenmix.functional.external import external_weights

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def parts(B: int, T: int, D: int, heads: int, slots: int, dtype=torch.float32, size: float = 1.0):
    draw = torch.Generator().manual_seed(0)
    shapes = (B, T, D), (slots, D // heads), (slots, D // heads), (slots,), (D // heads,)
    x, *rest = (torch.randn(s, generator=draw) for s in shapes)
    return tuple(a.to(dtype) for a in (x * size, *rest))


@pytest.mark.parametrize("norm", ["double", "tokens"])
@pytest.mark.parametrize("eps", [0.0, 1e-9])
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_no_slot_and_no_token_is_zero_over_zero(size, eps, norm):
    leaves = [a.requires_grad_() for a in parts(2, 130, 12, 2, 9, size=size)]
    y = functional.external(*leaves, heads=2, norm=norm, eps=eps, backend="cpu")
    assert all(bool(a.isfinite().all()) for a in (y, *torch.autograd.grad(y.sum(), leaves)))


def test_one_thread_gives_the_same_bits_as_two():
    logits = torch.randn(3, 300, 2, 37, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        w = external_weights(logits, None, "double", 1e-9)
        found.append([w, *torch.autograd.grad(w.square().sum(), logits)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_what_the_kernel_lacks_stays_on_the_eager_form():
    args = parts(1, 5, 4, 2, 3)
    for lacking in ({"causal": True}, {"norm": "slots"}):
        with pytest.raises(MixerError, match="no causal form|slots"):
            functional.external(*args, heads=2, backend="cpu", **lacking)
        assert torch.equal(
            functional.external(*args, heads=2, **lacking),
            functional.external(*args, heads=2, backend="eager", **lacking),
        )
