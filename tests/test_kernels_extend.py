"""New tokens of a stream on the C kernels, with gradients: equal to plain torch over any cuts."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmix import functional, use_backend
from tokenmix.functional.aft_chunk import absorb, aft_simple_chunk, empty_past
from tokenmix.functional.aft_forget import aft_forget_chunk
from tokenmix.functional.linear import linear_chunk
from tokenmix.functional.sums.features import empty_features
from tokenmix.functional.sums.kernel_attention import extend_chunk
from tokenmix.kernels import cpu
from tokenmix.mixers import build_mixer

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C kernels")

B, L, D, HEADS = 2, 150, 8, 2
E = D // HEADS
CLOSE = {torch.float32: 4e-6, torch.bfloat16: 6e-2, torch.float16: 5e-3}


def drawn(dtype: torch.dtype, *, spread: float = 1.0, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v, g = (torch.randn(B, L, D, generator=draw, dtype=torch.float64) for _ in range(4))
    return [a.to(dtype) for a in (q, k * spread, v, -torch.nn.functional.softplus(g - 2.0))]


def past(form: str = "", seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    m, num, den = (torch.randn(B, D, generator=draw, dtype=torch.float64) for _ in range(3))
    if form.startswith("linear"):
        acc = torch.randn(B, HEADS, E + 1, E, generator=draw, dtype=torch.float64)
        acc[..., E, :] = acc[..., E, :].abs() + 0.5
        return [m.unflatten(1, (HEADS, E)), acc]
    if form.startswith("hydra"):
        return [torch.zeros_like(m), num]
    return [m.float().double(), num, den.abs() + 0.5]


def simple(q: Tensor, k: Tensor, v: Tensor, g: Tensor, past: tuple[Tensor, ...], **options) -> tuple:
    return aft_simple_chunk(q, k, v, past, **options)


def linear(q: Tensor, k: Tensor, v: Tensor, g: Tensor, past: Any, *, feature: str, key_mask: Tensor | None = None):
    return linear_chunk(q, k, v, tuple(past), heads=HEADS, feature=feature, key_mask=key_mask)


def hydra(q: Tensor, k: Tensor, v: Tensor, g: Tensor, past: Any, *, feature: str, key_mask: Tensor | None = None):
    options = {"heads": D, "feature": feature, "normalise": False, "eps": 1e-6}
    number = torch.tensor([4, 0])
    y, (total, _) = extend_chunk(q, k, v, (past[1], number), valid=key_mask, **options)
    return y, (past[0], total)


FORMS = {
    "aft_forget": aft_forget_chunk,
    "aft_forget norm": partial(aft_forget_chunk, heads=2),
    "aft_simple": simple,
    "linear": partial(linear, feature="elu"),
    "linear exp": partial(linear, feature="exp"),
    "hydra": partial(hydra, feature="cosine"),
    "hydra mean": partial(hydra, feature="mean"),
}
GATED = [(form, {"gate": gate}) for form in list(FORMS)[:3] for gate in ("sigmoid", "tanh", None)]


def eagerly(form):
    def plain(*args, **options):
        with use_backend("eager"):
            return form(*args, **options)

    return plain


def loss_of(y: Tensor, after: tuple[Tensor, ...]) -> Tensor:
    """A number that depends on the outputs and on the sums after them, whatever their unit."""
    top = after[0].max() if len(after) == 3 else 0.0  # those of linear attention have units that differ by route
    unit = torch.exp((after[0] - top).detach().clamp_min(-700.0))
    sums = [a * (unit if a.ndim == unit.ndim else unit[..., None, :]) for a in after[1:]]
    weights = torch.linspace(-1.0, 1.0, y.numel(), dtype=torch.float64).view_as(y)
    return (y.double() * weights).sum() + 0.7 * sums[0].sum() + 1e-3 * sums[-1].square().sum()


def found(form, inputs: list[Tensor], start: list[Tensor], **options) -> list[Tensor]:
    """The outputs, and the gradients of q, k, v, g and the sums before; 0 for what has none."""
    leaves = [a.clone().requires_grad_() for a in (*inputs, *start[1:])]
    y, after = form(*leaves[:4], (start[0], *leaves[4:]), **options)
    return [y.detach(), *torch.autograd.grad(loss_of(y, after), leaves, materialize_grads=True)]


def close(got: list[Tensor], want: list[Tensor], limit: float) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        scale = max(float(b.double().abs().max()), 1e-30)
        off = float((a.double() - b.double()).abs().max()) / scale
        assert off <= limit, (i, off)


def masks() -> dict[str, Tensor | None]:
    holes = torch.rand(B, L, generator=torch.Generator().manual_seed(3)) > 0.3
    nothing = holes.clone()
    nothing[1], nothing[0, -20:] = False, False
    return {"none": None, "holes": holes, "nothing": nothing}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("form", "gate"), [*GATED, *((form, {}) for form in list(FORMS)[3:])], ids=str)
@pytest.mark.parametrize("mask", ["none", "holes", "nothing"])
def test_equals_plain_torch(dtype, form, gate, mask):
    options = {**gate, "key_mask": masks()[mask]}
    inputs, start = drawn(dtype), past(form)
    want = found(eagerly(FORMS[form]), [a.double() for a in inputs], start, **options)
    close(found(FORMS[form], inputs, start, **options), want, CLOSE[dtype])


WHOLE = {
    "aft_forget": functional.aft_forget,
    "aft_simple": lambda q, k, v, g, **o: functional.aft_simple(q, k, v, **o),
    "linear": lambda q, k, v, g, **o: functional.linear_attention(q, k, v, heads=HEADS, **o),
    "hydra": lambda q, k, v, g, **o: functional.hydra(q, k, v, **o),
}


@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize("cuts", [(1, 65, 66, 130), (64, 128), (149,)])
def test_cuts_change_nothing(form, cuts):
    """From an empty state on, against whole sequences in float64."""
    inputs = drawn(torch.float32, spread=3.0)
    wide = [a.double().requires_grad_() for a in inputs]
    weights = torch.linspace(-1.0, 1.0, B * L * D, dtype=torch.float64).view(B, L, D)
    want = torch.autograd.grad((WHOLE[form](*wide, causal=True) * weights).sum(), wide, materialize_grads=True)
    leaves = [a.clone().requires_grad_() for a in inputs]
    state: Any = empty_features(B, HEADS, E, E) if form == "linear" else empty_past(B, D, D)
    state, outputs = [torch.zeros_like(state[1])] * 2 if form == "hydra" else state, []
    for start, stop in pairwise((0, *cuts, L)):
        y, state = FORMS[form](*(a[:, start:stop] for a in leaves), state)
        outputs.append(y)
    loss = (torch.cat(outputs, 1).double() * weights).sum()
    got = torch.autograd.grad(loss, leaves, materialize_grads=True)
    close(list(got), list(want), 2e-6)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "linear exp"])  # exp(30) of a sum is too large
@pytest.mark.parametrize("spread", [1e-4, 30.0, 1e4])
def test_keys_of_any_size(form, spread):
    """And a token that forgets all before it, in one row."""
    inputs, start = drawn(torch.float32, spread=spread), past(form)
    inputs[3][0, 70] = -torch.inf
    if form.startswith("aft"):
        start[0] = (start[0] * spread).float().double()
    want = found(eagerly(FORMS[form]), [a.double() for a in inputs], start)
    close(found(FORMS[form], inputs, start), want, 2e-5 * max(1.0, spread / 30))


@pytest.mark.parametrize("form", ["linear", "hydra", "aft_simple"])
def test_a_long_chunk_without_gradients_is_that_of_short_ones(form):
    """The former in blocks, the latter token by token in float64."""
    *inputs, start = *drawn(torch.float32, spread=3.0), past(form)
    whole, (unit, *sums) = FORMS[form](*inputs, start)
    state, outputs = tuple(start), []
    for cut in range(0, L, 50):
        y, state = FORMS[form](*(a[:, cut : cut + 50].contiguous() for a in inputs), state)
        outputs.append(y)
    scale = torch.exp(state[0] - unit)
    want = [a * (scale if a.ndim == scale.ndim else scale[..., None, :]) for a in state[1:]]
    close([whole, *sums], [torch.cat(outputs, 1), *want], 2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_are_those_of_plain_torch(form):
    inputs, start = drawn(torch.float32), past(form)

    def twice(form) -> list[Tensor]:
        leaves = [a.clone().requires_grad_() for a in (*inputs, *start[1:])]
        loss = loss_of(*form(*leaves[:4], (start[0], *leaves[4:])))
        first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
        total = sum(a.double().square().sum() for a in first)
        return list(torch.autograd.grad(total, leaves, materialize_grads=True))

    close(twice(FORMS[form]), twice(eagerly(FORMS[form])), 2e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("form", ["aft_forget", "aft_simple", "linear", "hydra"])
def test_non_finite_tokens_reach_no_earlier_row(form, which, value):
    """Outputs and gradients are finite where those of plain torch are, but for the gradients of the token itself."""
    if which in (0, 3):  # an infinite query opens its gate, an infinite decay is none
        value = float("nan")
    inputs = drawn(torch.float32)
    inputs[which][0, 90, 3] = value

    def pattern(call) -> list[Tensor]:
        leaves = [a.clone().requires_grad_() for a in inputs]
        y, _ = call(*leaves, tuple(past(form)))
        (y[:, :80] * 2.0).sum().backward()
        found = [y, *(a.grad for a in leaves if a.grad is not None)]
        return [torch.cat([a[:, :90], a[:, 91:]], 1).isfinite() for a in found]

    for a, b in zip(pattern(FORMS[form]), pattern(eagerly(FORMS[form])), strict=True):
        # Plain torch marks a whole row of Hydra, the kernel the feature that is not finite.
        assert torch.equal(a | b, a) if form == "hydra" else torch.equal(a, b)


@pytest.mark.parametrize("mask", ["none", "holes", "nothing"])
def test_sums_alone(mask):
    """``absorb`` with gradients."""

    def grads(dtype: torch.dtype) -> list[Tensor]:
        leaves = [a.to(dtype).requires_grad_() for a in drawn(torch.float32)[1:3]]
        after = absorb(tuple(past()), *leaves, masks()[mask])
        return [a.detach() for a in after[1:]] + list(torch.autograd.grad(loss_of(leaves[1], after), leaves))

    close(grads(torch.float32), grads(torch.float64), 2e-6)


def test_forward_mode_and_functional_transforms_use_plain_torch():
    inputs, start = drawn(torch.float32), tuple(past())
    _, tangent = torch.func.jvp(lambda v: aft_forget_chunk(*inputs[:2], v, inputs[3], start)[0], *[(inputs[2],)] * 2)
    assert torch.isfinite(tangent).all()


@pytest.mark.parametrize("name", ["aft_forget", "aft_pairs"])
@pytest.mark.parametrize("gaps", [False, True])
def test_a_long_chunk_with_gradients(name, gaps):
    """More tokens than a piece has: one piece where they stand in a row, several where they do not."""
    torch.manual_seed(0)
    options = {} if name == "aft_forget" else {"heads": 2, "rank": 2}
    mixer, x = build_mixer(name, D, causal=True, **options), torch.randn(1, 1100, D)
    at = torch.arange(1100)[None] + (torch.arange(1100)[None] > 600).long() * gaps
    want = mixer(x, positions=at)[:, 3:]
    leaves = list(mixer.parameters())
    expected = torch.autograd.grad(want.square().sum(), leaves)
    _, state = mixer.extend(x[:, :3], mixer.init_state(1), positions=at[:, :3])
    y, _ = mixer.extend(x[:, 3:], state, positions=at[:, 3:])
    close([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)], [want.detach(), *expected], 2e-5)
