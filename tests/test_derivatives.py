"""torch.func on float32 mixers whose ordinary path is torch's fused attention, which knows neither forward nor second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from test_contract import subject_of

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
