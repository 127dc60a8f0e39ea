"""Test that C reads the numbers of a tensor whose negation torch postpones, and that forward derivatives stream."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from cases import CASES
from tokenmix import MIXERS, build_mixer
from tokenmix.kernels.tokenwise import rms_norm, rotate, silu_gate
from tokenmix.testing import perturb

STEPPED = [name for name, mixer in MIXERS.items() if mixer.facts.kernels.step]


def lazy(a: torch.Tensor) -> torch.Tensor:
    """The same numbers, their negation postponed."""
    return torch._neg_view(a.neg()) if a.is_floating_point() else a


def streamed(name: str):
    options = next(options for other, options in CASES.values() if other == name)
    mixer = perturb(build_mixer(name, 8, causal=True, **options).eval(), seed=0)
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        return mixer, x[:, 5:], mixer.extend(x[:, :5], mixer.init_state(2))[1]


@pytest.mark.parametrize("name", STEPPED)
def test_a_postponed_negation_is_read(name):
    mixer, x, state = streamed(name)
    for new in (x, torch.randn(2, 3, 8)):
        with torch.no_grad():
            want = mixer.extend(new, state)
            for given in ((lazy(new), state), (new, pytree.tree_map(lazy, state))):
                got = mixer.extend(*given)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STEPPED)
def test_forward_derivatives_reach_a_stream(name):
    mixer, x, state = streamed(name)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(mixer.extend(dual, state)[0]).tangent
    ahead, back = (mixer.double().extend(x.double() + h, state)[0] for h in (1e-5, -1e-5))
    torch.testing.assert_close(tangent, ((ahead - back) / 2e-5).float(), rtol=1e-3, atol=1e-3)


def test_tokenwise_kernels_read_a_postponed_negation():
    x, weight = torch.randn(2, 3, 2, 8), torch.randn(8)
    cos, sin = torch.randn(2, 2, 3, 4)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(lazy(x), lazy(weight)), rms_norm(x, weight))
        torch.testing.assert_close(silu_gate(lazy(x), lazy(x)), silu_gate(x, x))
        torch.testing.assert_close(rotate(lazy(x), lazy(cos), lazy(sin)), rotate(x, cos, sin))
