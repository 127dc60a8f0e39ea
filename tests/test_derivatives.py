"""Test torch.func on float32 mixers whose ordinary path is torch's fused attention.

Fused attention knows neither forward nor second derivatives.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from cases import CASES, subject_of
from tokenmix import MIXERS
from tokenmix.functional.sums.fused_attention import fused_attention
from tokenmix.functional.sums.nonfinite import add_nan_mask

FUSED = ("attention", "linformer", "memory_compressed", "set", "spatial_reduction", "simplified_attention")


@pytest.mark.parametrize("case", FUSED)
def test_forward_derivatives(case):
    s = subject_of(case, False)
    x, t = s.x(), s.x(stream=1)
    want = torch.func.jvp(s.build(), (x,), (t,))[1].float()
    mixer, x, t = s.build(dtype=torch.float32), x.float(), t.float()
    torch.testing.assert_close(torch.func.jvp(mixer, (x,), (t,))[1], want, rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(mixer(forward_ad.make_dual(x, t))).tangent
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", FUSED)
def test_second_derivatives_by_func_and_vmap(case):
    s = subject_of(case, False)

    def twice(mixer, x):
        return torch.func.grad(lambda a: torch.func.grad(lambda b: mixer(b).square().sum())(a).square().sum())(x)

    want = twice(s.build(), s.x()).float()
    mixer, x = s.build(dtype=torch.float32), s.x(dtype=torch.float32)
    assert float((twice(mixer, x) - want).detach().abs().max()) <= 1e-4 * float(want.detach().abs().max())
    torch.testing.assert_close(torch.func.vmap(lambda a: mixer(a[None])[0])(x), mixer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        "attention",
        "attention-grouped",
        "simplified_attention",
        "linformer",
        "set",
        "memory_compressed",
        "spatial_reduction",
    ],
)
def test_second_derivatives_by_autograd(case, causal):
    s = subject_of(case, causal and MIXERS[CASES[case][0]].facts.causal)
    keep = torch.ones(2, s.length, dtype=torch.bool)
    keep[0, :3] = False
    for mask in (None, keep):
        found = []
        for dtype in (torch.float64, torch.float32):
            mixer, x = s.build(dtype=dtype), s.x(dtype=dtype).requires_grad_()
            first = torch.autograd.grad(mixer(x, key_mask=mask).square().sum(), x, create_graph=True)[0]
            found.append(
                (first, *torch.autograd.grad(first.square().sum(), [x, *mixer.parameters()], allow_unused=True))
            )
        pairs = [(want.detach(), got.detach()) for want, got in zip(*found, strict=True) if want is not None]
        largest = max(
            float(want.abs().max()) for want, _ in pairs
        )  # the bias of keys cancels: its derivative is rounding
        assert max(float((got - want).abs().max()) for want, got in pairs) <= 1e-4 * largest, (
            case,
            causal,
            mask is None,
        )


def test_the_fused_kernel_is_still_what_runs():
    """First derivatives are torch's own, to the bit, with groups of keys and masks as well."""
    for groups, causal, masked in ((4, True, False), (2, True, False), (2, False, True), (4, False, False)):
        q, k, v, g = (torch.randn(2, n, 9, 8) for n in (4, groups, groups, 4))
        mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril() if masked else None
        ours, theirs = ([a.clone().requires_grad_() for a in (q, k, v)] for _ in range(2))
        y = fused_attention(*ours, mask=mask, causal=causal)
        assert type(y.grad_fn).__name__ == "_TwiceBackward"
        want = F.scaled_dot_product_attention(*theirs, attn_mask=mask, is_causal=causal, enable_gqa=groups != 4)
        assert torch.equal(y, want)
        for a, b in zip(torch.autograd.grad(y, ours, g), torch.autograd.grad(want, theirs, g), strict=True):
            assert torch.equal(a, b)


def test_a_gradient_that_is_not_needed_stays_none():
    """Some versions of torch call the hooks of an output with None."""
    mark = torch.tensor([[[float("nan")], [0.0]]])
    y = torch.ones(1, 2, 1, requires_grad=True) * 2
    add_nan_mask(y, mark)
    (hook,) = y._backward_hooks.values()
    assert hook(None) is None
    assert hook(torch.ones(1, 2, 1)).isnan().flatten().tolist() == [True, False]
