"""Test the kernels of what a block does to each token alone, against the eager forms in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernel_checks import both, worst
from tokenmix import MixerError
from tokenmix.kernels.operator import Operator
from tokenmix.kernels.tokenwise import gate_kernel, rms_kernel, rms_norm, rotate, rotate_kernel, silu_gate
from tokenmix.mixers.parts.token_norm import RMSNorm

TOL = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZES = [(2, 70, 3, 18), (1, 130, 1, 64), (3, 1, 2, 6), (1, 200, 2, 130)]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned(interleaved: bool, batches: int | None, width: int) -> Callable[..., Tensor]:
    """Rotate by fixed angles in x's dtype, float32 at least; the first 2 * width features of each head."""

    def form(x: Tensor, backend: str) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = draw(batches or x.shape[0], x.shape[1], width, seed=5).to(wide)
        return rotate(x, angles.cos(), angles.sin(), interleaved=interleaved, backend=backend)

    return form


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equal_the_eager_forms_in_float64(size, dtype):
    B, T, H, e = size
    x, y = draw(B, T, H * e, dtype=dtype), draw(B, T, H * e, seed=1, dtype=dtype)
    weight = draw(H * e, seed=2, dtype=dtype)
    assert worst(both(rms_norm, (x, weight), {})) < TOL[dtype]
    assert worst(both(rms_norm, (x,), {})) < TOL[dtype]
    assert worst(both(silu_gate, (4 * x, y), {})) < TOL[dtype]
    for interleaved, batches, width in ((False, 1, e // 2), (True, None, e // 2), (False, None, e // 3), (True, 1, 1)):
        form = turned(interleaved, batches, width)
        assert worst(both(form, (x.unflatten(-1, (H, e)),), {})) < TOL[dtype]


def test_strides_are_read_as_they_are():
    x, y = draw(3, 140, 24)[:, ::2], draw(2, 70, 3, 24, seed=1)[:1].expand(2, -1, -1, -1).transpose(1, 2)
    assert torch.equal(rms_norm(x, backend="cpu"), rms_norm(x.contiguous(), backend="cpu"))
    assert torch.equal(silu_gate(x, x.flip(0), backend="cpu"), silu_gate(x.clone(), x.flip(0).clone(), backend="cpu"))
    angles = draw(1, 3, 12).expand(2, -1, -1)
    assert torch.equal(*(rotate(a, angles.cos(), angles.sin(), backend="cpu") for a in (y, y.contiguous())))


def test_squares_that_overflow_float32_do_no_harm():
    """torch's own form returns 0 here, as 1 / sqrt(inf) is 0."""
    x = torch.tensor([[3e30, -4e30], [3e-30, -4e-30], [0.0, 0.0]], requires_grad=True)
    y = rms_norm(x, eps=0.0, backend="cpu")
    want = torch.tensor([3.0, -4.0]) / 12.5**0.5
    assert torch.allclose(y[0], want)
    assert torch.allclose(y[1], want)
    (d,) = torch.autograd.grad(y[:2].sum(), x)
    exact = x.detach().double().requires_grad_()
    (e,) = torch.autograd.grad(F.rms_norm(exact, (2,), None, 0.0)[:2].sum(), exact)
    assert torch.allclose(d[:2].double() * exact[:2].abs(), e[:2] * exact[:2].abs(), atol=1e-6)
    assert rms_norm(x, eps=1e-5, backend="cpu")[2].eq(0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_spoils_its_own_token_alone(bad):
    x, y = draw(2, 70, 24), draw(2, 70, 24, seed=1)
    x[1, 40, 7] = bad
    cos = sin = torch.ones(1, 70, 4)
    for run in (
        lambda backend: rms_norm(x, y[0, 0], backend=backend),
        lambda backend: silu_gate(x, y, backend=backend),
        lambda backend: silu_gate(y, x, backend=backend),
        lambda backend: rotate(x.unflatten(-1, (3, 8)), cos, sin, backend=backend),
    ):
        got, want = run("cpu"), run("eager")
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.allclose(got, want, 1e-5, 1e-6, equal_nan=True)


def test_one_thread_gives_the_same_bits_as_two():
    x, y, weight = draw(3, 300, 102), draw(3, 300, 102, seed=1), draw(102)
    angles, before, found = draw(1, 300, 8), torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        leaves = [a.detach().clone().requires_grad_() for a in (x, y, weight)]
        heads = rms_norm(leaves[0], leaves[2], backend="cpu").unflatten(-1, (3, 34))
        out = silu_gate(rotate(heads, angles.cos(), angles.sin(), backend="cpu").flatten(2), leaves[1], backend="cpu")
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


CALLS = {
    "rms_norm": (rms_kernel, (draw(2, 30, 6), draw(6, seed=1), 1e-5)),
    "rms_norm without a weight": (rms_kernel, (draw(2, 30, 6), None, 1e-5)),
    "rotate": (rotate_kernel, (draw(2, 30, 3, 4), draw(1, 30, 2).cos(), draw(1, 30, 2).sin(), True)),
    "silu_gate": (gate_kernel, (draw(2, 30, 6), draw(2, 30, 6, seed=1))),
}


def leaves_of(operator: Operator, args: tuple) -> list:
    """The arguments, with gradients asked of those that have one."""
    given = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
    for a, has in zip(given, operator.differentiable, strict=False):
        if has and a is not None:
            a.requires_grad_()
    return given


@pytest.mark.parametrize("name", CALLS)
def test_the_operators_pass_opcheck(name):
    operator, args = CALLS[name]
    leaves = leaves_of(operator, args)
    torch.library.opcheck(operator.forward, (*leaves, True))
    results = operator.forward(*leaves, True)
    y, *saved = [a.detach() for a in ([results] if isinstance(results, Tensor) else results)]
    inputs, options = leaves[: operator.count], leaves[operator.count :]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator.backward, (torch.randn_like(y), *inputs, *saved, *options), test_utils=checks)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_and_compilation_agree_with_eager(name):
    operator, args = CALLS[name]
    found = []
    torch.compiler.reset()
    for run in (operator, operator.eager, torch.compile(operator, fullgraph=True, backend="aot_eager")):
        leaves = leaves_of(operator, args)
        asked = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]
        twice = run in (operator, operator.eager)
        first = torch.autograd.grad(run(*leaves).sin().sum(), asked, create_graph=twice)
        found.append([*first, *(torch.autograd.grad(sum(g.square().sum() for g in first), asked) if twice else ())])
    assert all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(found[0], found[1], strict=True))
    assert all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(found[0], found[2], strict=False))


def test_other_dtypes_and_devices_take_the_eager_form():
    x = draw(2, 5, 8)
    assert rms_norm(x.double()).dtype == torch.float64
    assert rms_norm(x.to("meta"), torch.ones(8, device="meta")).shape == x.shape
    assert rms_norm(x.bfloat16(), torch.ones(8)).shape == x.shape  # as under autocast
    assert rms_norm(x[:, :0]).shape == (2, 0, 8)
    assert silu_gate(x[:0], x[:0]).shape == (0, 5, 8)
    assert torch.allclose(torch.vmap(rms_norm)(x), rms_norm(x), atol=1e-6)
    with pytest.raises(MixerError, match=r"rms_norm: backend='cpu': its kernel takes a weight of x's last dimension 8"):
        rms_norm(x, torch.ones(4), backend="cpu")
    with pytest.raises(MixerError, match=r"silu_gate: backend='cpu': its kernel takes one shape, got \(2, 5, 8\), \(8"):
        silu_gate(x, x[0, 0], backend="cpu")
    with pytest.raises(MixerError, match=r"rotate: backend='cpu': its kernel takes cos and sin in float32"):
        rotate(x[..., None, :], *[torch.ones(1, 5, 4).double()] * 2, backend="cpu")


def test_the_module_is_torchs():
    x, ours, theirs = draw(3, 7, 24), RMSNorm(24, eps=1e-5), nn.RMSNorm(24, eps=1e-5)
    with torch.no_grad():
        theirs.weight.copy_(draw(24))
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, nn.RMSNorm)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)
