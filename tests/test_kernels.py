"""Test every C kernel by one table of forms.

The adversarial measure, equality with the eager form, masks, layouts, threads, derivatives, compilation. What only one
family has to show stands in a file of its own, ``test_kernels_FAMILY.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernel_checks import adversarial, both, worst
from tokenmix import MIXERS, functional
from tokenmix.functional.recurrence import recurrence_kernel
from tokenmix.functional.sums.kernel_attention import MAPS
from tokenmix.kernels.operator import OPERATORS, Operator
from tokenmix.kernels.tokenwise import gate_kernel, rms_kernel, rotate_kernel

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
Call = tuple[Callable[..., Tensor], tuple[Tensor, ...], dict[str, Any]]


class Draw:
    """Random tensors of one dtype, the same for a seed."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


def aft_simple(B, T, D, draw) -> Call:
    return functional.aft_simple, (draw(B, T, D), draw(B, T, D), draw(B, T, D)), {}


def aft_full(B, T, D, draw) -> Call:
    return functional.aft_full, (draw(B, T, D), draw(B, T, D), draw(B, T, D), draw(T, T)), {}


def aft_full_batched(B, T, D, draw) -> Call:
    return functional.aft_full, (draw(B, T, D), draw(B, T, D), draw(B, T, D), draw(B, T, T)), {}


def with_factors(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, a, b, **options: form(q, k, v, (a, b), **options)


def aft_full_factors(B, T, D, draw) -> Call:
    return (
        with_factors(functional.aft_full),
        (draw(B, T, D), draw(B, T, D), draw(B, T, D), draw(T, 4) / 2, draw(T, 4) / 2),
        {},
    )


def aft_local(B, T, D, draw) -> Call:
    return functional.aft_local, (draw(B, T, D), draw(B, T, D), draw(B, T, D), draw(T, T)), {"window": 7}


def aft_local_batched(B, T, D, draw) -> Call:
    return functional.aft_local, (draw(B, T, D), draw(B, T, D), draw(B, T, D), draw(B, T, T)), {"window": 20}


def aft_local_factors(B, T, D, draw) -> Call:
    return (
        with_factors(functional.aft_local),
        (draw(B, T, D), draw(B, T, D), draw(B, T, D), draw(T, 4) / 2, draw(T, 4) / 2),
        {"window": 7},
    )


def aft_forget(B, T, D, draw) -> Call:
    args = draw(B, T, D), draw(B, T, D), draw(B, T, D), draw(B, T, D) / 4
    return functional.aft_forget, args, {"gate": "identity"}  # the gate is torch's, and the bits of its sigmoid vary


def aft_forget_norm(B, T, D, draw) -> Call:
    """A norm of the ratio, of values that are not around 0: what divides by numbers that cancel has no bound."""
    signs = torch.where(torch.arange(D) % 2 == 0, 2.0, -2.0)
    args = draw(B, T, D), draw(B, T, D), (draw(B, T, D) / 4 + signs).to(draw.dtype), draw(B, T, D) / 4
    return functional.aft_forget, args, {"heads": next(n for n in (7, 3, 2, 1) if D % n == 0), "gate": "identity"}


def aft_pairs(B, T, D, draw) -> Call:
    heads = next(n for n in (3, 2, 1) if D % n == 0)
    a, b, decay = (draw(B, T, heads, 3) / 2 for _ in range(3))
    args = draw(B, T, D), draw(B, T, D), draw(B, T, D), a, b, decay / 2
    return functional.aft_pairs, args, {"gate": "identity"}


def aft_conv(B, T, D, draw) -> Call:
    h = next(n for n in (3, 2, 5, 1) if D % n == 0)
    return functional.aft_conv, (draw(B, T, D), draw(B, T, h), draw(B, T, D), draw(h, 7)), {}


def aft_conv2d(B, T, D, draw) -> Call:
    h = next(n for n in (3, 2, 5, 1) if D % n == 0)
    rows = next(n for n in (5, 3, 2, 1) if T % n == 0)
    return (
        functional.aft_conv,
        (draw(B, T, D), draw(B, T, h), draw(B, T, D), draw(h, 3, 3)),
        {"grid": (rows, T // rows)},
    )


def hydra(B, T, D, draw) -> Call:
    return functional.hydra, (draw(B, T, D), draw(B, T, D), draw(B, T, D)), {}


def hydra_mean(B, T, D, draw) -> Call:
    return functional.hydra, (draw(B, T, D), draw(B, T, D), draw(B, T, D)), {"normalise": True}


def hydra_softmax(B, T, D, draw) -> Call:
    return functional.hydra, (draw(B, T, D), draw(B, T, D), draw(B, T, D)), {"feature": "sigmoid/softmax"}


def linear(B, T, D, draw) -> Call:
    return functional.linear_attention, (draw(B, T, D), draw(B, T, D), draw(B, T, D)), {"heads": 2 if D % 2 == 0 else 1}


def linear_softmax(B, T, D, draw) -> Call:
    form, args, options = linear(B, T, D, draw)
    return form, args, {**options, "feature": "softmax"}


def external(B, T, D, draw) -> Call:
    heads = 2 if D % 2 == 0 else 1
    e = D // heads
    return functional.external, (draw(B, T, D), draw(9, e), draw(9, e), draw(9), draw(e)), {"heads": heads}


def external_tokens(B, T, D, draw) -> Call:
    form, args, options = external(B, T, D, draw)
    return form, args, {**options, "norm": "tokens"}


class Form(NamedTuple):
    """A call of a functional form, its operator, the mixer by which it is measured, and what it has."""

    call: Callable[..., Call]
    operator: str
    mixer: tuple[str, dict[str, Any]]
    causal: tuple[bool, ...] = (False, True)
    """Whether the kernel is causal; (False,) where the form has no such option."""
    gates: bool = True
    cross: bool = False
    measured: tuple[tuple[int, int], ...] = ((8, 150), (66, 131), (4, 64))
    """Features and tokens at which the adversarial measure is taken."""
    tokens: int = 2
    """Count the first arguments that vary along with the tokens of values and keys.

    From 1, k and v; x alone in external attention.
    """


SQUARE = {"max_len": 150}
FORMS = {
    "aft_simple": Form(aft_simple, "aft_simple", ("aft_simple", {}), cross=True),
    "aft_full": Form(aft_full, "aft_full", ("aft_full", SQUARE)),
    "aft_full batched": Form(aft_full_batched, "aft_full", ("aft_full", SQUARE)),
    "aft_full factors": Form(aft_full_factors, "aft_full", ("aft_full", {**SQUARE, "rank": 5})),
    "aft_local": Form(aft_local, "aft_band", ("aft_local", {**SQUARE, "window": 5})),
    "aft_local batched": Form(aft_local_batched, "aft_band", ("aft_local", {**SQUARE, "window": 33})),
    "aft_local factors": Form(aft_local_factors, "aft_band", ("aft_local", {**SQUARE, "window": 61, "rank": 4})),
    "aft_forget": Form(aft_forget, "aft_forget", ("aft_forget", {"key_norm": False}), causal=(True,)),
    "aft_forget norm": Form(aft_forget_norm, "aft_forget", ("aft_forget", {"key_norm": False}), causal=(True,)),
    "aft_pairs": Form(
        aft_pairs,
        "aft_pairs",
        ("aft_pairs", {"heads": 2, "rank": 3, "norm": False, "key_norm": False}),
        causal=(True,),
    ),
    "aft_conv": Form(
        aft_conv,
        "aft_band",
        ("aft_conv", {"heads": 2, "kernel_size": 5, "reparam": False}),
        measured=((8, 61), (70, 40)),
    ),
    "aft_conv2d": Form(
        aft_conv2d,
        "aft_conv2d",
        ("aft_conv", {"ndim": 2, "heads": 2, "kernel_size": 3}),
        causal=(False,),
        measured=((12, 49),),
    ),
    "hydra": Form(hydra, "hydra", ("hydra", {}), gates=False, cross=True),
    "hydra mean": Form(hydra_mean, "hydra", ("hydra", {"feature": "mean"}), gates=False, cross=True),
    "hydra softmax": Form(
        hydra_softmax, "aft_simple", ("hydra", {"feature": "sigmoid/softmax"}), gates=False, cross=True
    ),
    "linear": Form(linear, "linear", ("linear", {"heads": 2}), gates=False, cross=True),
    "linear softmax": Form(
        linear_softmax, "linear", ("linear", {"heads": 2, "feature": "softmax"}), gates=False, cross=True
    ),
    "external": Form(
        external,
        "external",
        ("external", {"slots": 33}),
        measured=((40, 65), (6, 1)),
        causal=(False,),
        gates=False,
        tokens=0,
    ),
    "external tokens": Form(
        external_tokens,
        "external",
        ("external", {"slots": 33, "norm": "tokens"}),
        measured=((40, 65), (6, 1)),
        causal=(False,),
        gates=False,
        tokens=0,
    ),
}
ROWS = [
    pytest.param(name, causal, id=f"{name}{' causal' * causal}")
    for name, form in FORMS.items()
    for causal in form.causal
]
every_form = pytest.mark.parametrize(("name", "causal"), ROWS)


def call(name: str, causal: bool, B: int, T: int, D: int, dtype: torch.dtype = torch.float32) -> Call:
    """The form, its arguments and options."""
    form, args, options = FORMS[name].call(B, T, D, Draw(dtype))
    return form, args, {**options, "causal": causal} if True in FORMS[name].causal else options


def with_grad(args: tuple[Tensor, ...]) -> list[Tensor]:
    return [a.detach().requires_grad_() for a in args]


def test_every_operator_has_its_forms():
    others = (rms_kernel, rotate_kernel, gate_kernel, recurrence_kernel)  # each has tests of its own
    of_mixers = set(OPERATORS) - {kernel.name for kernel in others}
    assert {form.operator for form in FORMS.values()} == of_mixers
    of_mixers.add(recurrence_kernel.name)
    assert {name for cls in MIXERS.values() for name in cls.facts.kernels.whole} == of_mixers
    served = {name for name, cls in MIXERS.items() if cls.facts.kernels.whole}
    assert {form.mixer[0] for form in FORMS.values()} <= served


@every_form
def test_adversarial_keys(name, causal):
    mixer, options = FORMS[name].mixer
    grid = {"grid": (7, 7)} if name == "aft_conv2d" else {}
    for dim, length in FORMS[name].measured:
        adversarial(mixer, {**options, "causal": True} if causal else options, dim=dim, length=length, **grid)


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@every_form
def test_equals_eager(name, causal, dtype):
    for B, T, D in ((1, 200, 64), (3, 65, 70), (2, 2, 6)):
        form, args, options = call(name, causal, B, T, D, dtype)
        for gate in ({"gate": "sigmoid"}, {"gate": None}, {"gate": "tanh"}) if FORMS[name].gates else ({},):
            assert worst(both(form, args, {**options, **gate})) < TOL[dtype], (B, T, D, gate)


@every_form
def test_one_token(name, causal):
    form, args, options = call(name, causal, 3, 1, 6)
    for a, b in both(form, args, options):
        assert (
            float((a - b).detach().abs().max()) < 1e-5
        )  # one key has all the weight whatever it is: gradients of logits are 0


@every_form
def test_masks_left_right_holes_and_whole_rows(name, causal):
    mask = torch.rand(4, 150, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, :70], mask[1, 80:], mask[2] = False, False, False
    form, args, options = call(name, causal, 4, 150, 34)
    at = range(1, 3) if FORMS[name].tokens else range(1)
    for held in (1e30, float("nan")):  # what a masked token holds has no influence
        given = tuple(torch.where(mask[..., None], a, held) if i in at else a for i, a in enumerate(args))
        pairs = both(form, given, {**options, "key_mask": mask})
        assert worst(pairs) < 1e-5
        assert pairs[0][0][2].eq(0).all()
        assert all(pairs[1 + i][0][~mask].eq(0).all() for i in at)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.cross])
def test_queries_over_other_keys(name):
    form, (q, *_), options = call(name, False, 2, 5, 20)
    k, v = (torch.randn(2, 91, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    mask = torch.rand(2, 91, generator=torch.Generator().manual_seed(3)) > 0.4
    for key_mask in (None, mask):
        assert worst(both(form, (q, k, v), {**options, "key_mask": key_mask})) < 1e-5
    assert worst(both(form, (k, q[:, :3], v[:, :3]), options)) < 1e-5


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda a: torch.cat([a, a], -1)[..., : a.shape[-1]],
    "batch inside": lambda a: a.transpose(0, 1).contiguous().transpose(0, 1),
    "features first": lambda a: a.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda a: a[:1].expand_as(a),
}


# Torch takes the logarithm of softmax features before the kernel, in another order of sums where features come first.
LAID = [
    pytest.param(*row.values, layout, id=f"{row.id}-{layout}")
    for row in ROWS
    for layout in LAYOUTS
    if (row.values[0], layout) != ("linear softmax", "features first")
]


@pytest.mark.parametrize(("name", "causal", "layout"), LAID)
def test_strides_are_taken_as_they_are(name, causal, layout):
    form, args, options = call(name, causal, 2, 90, 40)
    laid = [LAYOUTS[layout](a) if a.ndim == 3 else a for a in args]
    results = []
    for given in (laid, [a.clone(memory_format=torch.contiguous_format) for a in laid]):
        leaves = [a.detach().requires_grad_() for a in given]
        y = form(*leaves, **options, backend="cpu")
        results.append([y, *torch.autograd.grad(y, leaves, LAYOUTS[layout](torch.ones_like(y)))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@every_form
def test_masks_may_have_strides(name, causal):
    form, args, options = call(name, causal, 3, 70, 6)
    wide = torch.rand(3, 140, generator=torch.Generator().manual_seed(0)) > 0.5
    for mask in (wide[:, ::2], wide[:, :70].T.contiguous().T, wide[:1, 70:].expand(3, -1)):
        found = [
            form(*args, key_mask=m, **options, backend="cpu")
            for m in (mask, mask.clone(memory_format=torch.contiguous_format))
        ]
        # The products of external attention are torch's, whose bits depend on where tensors lie in memory.
        assert torch.equal(*found) if FORMS[name].tokens else torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "causal"), [row for row in ROWS if FORMS[row.values[0]].tokens]
)  # external attention's products are torch's
def test_one_thread_gives_the_same_bits_as_two(name, causal, dtype):
    form, args, options = call(name, causal, 3, 300, 102, dtype)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        leaves = with_grad(args)
        y = form(*leaves, **options, backend="cpu")
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@every_form
def test_the_second_derivative_is_the_eager_one(name, causal):
    form, args, options = call(name, causal, 2, 20, 6)
    found = []
    for backend in ("cpu", "eager"):
        leaves = with_grad(args)
        first = torch.autograd.grad(form(*leaves, **options, backend=backend).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    largest = max(float(a.detach().abs().max()) for a in found[1])  # that of a bias which shifts all tokens alike is 0
    assert all(float((a - b).detach().abs().max()) < 1e-5 * largest for a, b in zip(*found, strict=True))


@every_form
def test_the_operators_pass_opcheck(name, causal, monkeypatch):
    """Each pass of the operator, as its form calls it."""
    called: list[tuple[Operator, tuple[Any, ...]]] = []
    real = Operator.__call__
    monkeypatch.setattr(Operator, "__call__", lambda self, *args: called.append((self, args)) or real(self, *args))
    form, args, options = call(name, causal, 2, 30, 6)
    form(*with_grad(args), **options, backend="cpu")
    ((operator, given),) = called
    assert operator.name == FORMS[name].operator
    leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in given]
    torch.library.opcheck(operator.forward, (*leaves, True))
    y, *saved = (a.detach() for a in operator.forward(*leaves, True))
    kept = [y, *saved][operator.kept]
    # Not the check that compiles the derivative with dynamic shapes: it traces the eager form, for a minute where that
    # is long.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        operator.backward,
        (torch.randn_like(y), *leaves[: operator.count], *kept, *leaves[operator.count :]),
        test_utils=checks,
    )


@every_form
def test_compiles_whole(name, causal):
    form, args, options = call(name, causal, 2, 70, 6)
    leaves = with_grad(args)
    torch.compiler.reset()

    def plain(*a: Tensor) -> Tensor:
        return form(*a, **options, backend="cpu").square().sum()

    run = torch.compile(plain, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(*leaves), leaves) for f in (run, plain))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", [*MAPS, "cosine/identity", "tanh/cosine", "elu/softmax", "cosine/mean"])
def test_every_map_of_hydra_equals_eager(feature, causal, dtype):
    form, args, _ = call("hydra", causal, 2, 70, 17, dtype)
    assert worst(both(form, args, {"causal": causal, "feature": feature})) < TOL[dtype]
