"""Test gated linear recurrences on the C kernel: the loop in float64, all widths, documents, masks, threads."""

from __future__ import annotations

import random

import pytest
import torch

from test_recurrence import GRADIENT, RULES, compare, derive, draw, off
from tokenmix import MixerError
from tokenmix.functional import recurrence
from tokenmix.kernels import cpu
from tokenmix.testing.tolerances import ADVERSARIAL

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C library")
WIDTHS = ((1, 1), (8, 8), (33, 20), (64, 128), (256, 40), (17, 256))


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 257])
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_loop(rule, T):
    given, options = draw(rule, T, dk=24, dv=40, seed=T)
    compare(given, torch.float32, GRADIENT, **options, backend="cpu")


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("rule", ["gated", "gated_delta head", "gated_delta feature"])
def test_all_widths(rule, widths):
    given, options = draw("gated feature" if rule == "gated" else rule, 70, dk=widths[0], dv=widths[1])
    compare(given, torch.float32, 2 * GRADIENT, **options, backend="cpu")


@pytest.mark.parametrize("rule", ["gated_delta head", "gated_delta feature"])
def test_4096_tokens(rule):
    given, options = draw(rule, 4096, B=1, heads=(1, 1, 1), dk=64, dv=32)
    compare(given, torch.float32, GRADIENT, **options, backend="cpu")


@pytest.mark.parametrize("heads", [(1, 1, 2), (2, 2, 6), (4, 2, 2), (6, 1, 3), (2, 3, 6)])
def test_groups_of_heads(heads):
    given, options = draw("gated_delta feature", 40, heads=heads, dk=12, dv=5)
    compare(given, torch.float32, GRADIENT, **options, backend="cpu")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("documents", [False, True])
def test_masks_and_documents_as_in_plain_torch(rule, documents):
    """By positions that start documents inside of chunks, and by ends, an empty document included."""
    given, options = draw(rule, 150, B=1 if documents else 3, dk=12, dv=20)
    given = {name: a.float() for name, a in given.items()}
    valid = torch.rand(given["q"].shape[:2], generator=torch.Generator().manual_seed(1)) < 0.7
    if documents:
        options["cu_seqlens"] = torch.tensor([0, 40, 40, 41, 150])
        given["past"] = given["past"].expand(4, -1, -1, -1)
    positions = torch.arange(150).remainder(37).expand(valid.shape)
    spoiled = {
        name: a if name == "past" else torch.where(valid.view(*valid.shape, *[1] * (a.ndim - 2)), a, 3e38)
        for name, a in given.items()
    }
    options |= {"key_mask": valid, "positions": positions}
    y, state, grads = derive(recurrence, spoiled, **options, backend="cpu")
    exact = {name: a.double() for name, a in spoiled.items()}
    want, last, wanted = derive(recurrence, exact, **options, backend="eager")
    assert off(y, want) < GRADIENT
    assert off(state, last) < GRADIENT
    for name, grad in grads.items():
        assert off(grad, wanted[name]) < GRADIENT, name


def test_layouts_and_strides():
    given, options = draw("gated_delta feature", 20, heads=(2, 2, 2), dk=12, dv=20)
    given = {name: a.float() for name, a in given.items()}
    want, state = recurrence(**given, **options, backend="cpu")
    swapped = {name: a if name == "past" else a.transpose(1, 2).contiguous() for name, a in given.items()}
    y, last = recurrence(**swapped, **options, layout="bhtd", backend="cpu")
    assert torch.equal(y, want.transpose(1, 2))
    assert torch.equal(last, state)
    every = {name: torch.stack([a, a], -1)[..., 0] for name, a in given.items()}
    assert torch.equal(recurrence(**every, **options, backend="cpu")[0], want)


@pytest.mark.parametrize("rule", ["gated_delta head", "gated feature"])
def test_the_same_bits_from_any_number_of_threads(rule):
    given, options = draw(rule, 100, heads=(2, 2, 4), dk=24, dv=40)
    given = {name: a.float() for name, a in given.items()}
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            y, state, grads = derive(recurrence, given, **options, backend="cpu")
            found.append([y, state, *grads.values()])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("T", [1, 20])
def test_numbers_too_small_for_float32_are_zero(T):
    """Denormal numbers, to which a state decays, would slow a call by twenty times; the caller's mode stays."""
    given, options = draw("gated_delta head", T, heads=(1, 1, 1), dk=12, dv=20)
    given = {name: a.float() for name, a in given.items()} | {"decay": torch.full((2, T, 1), -86.0)}
    given["k"] = torch.zeros_like(given["k"])
    given["past"] = torch.full((2, 1, 12, 20), 1e-3)
    y, state, grads = derive(recurrence, given, **options, backend="cpu")
    for name, a in {"y": y, "state": state, **grads}.items():
        assert not bool(((a != 0) & (a.abs() < torch.finfo(torch.float32).tiny)).any()), name
    assert not bool(state.any())
    assert bool(torch.tensor(1e-30) * 1e-10 != 0)


def test_the_state_after_every_token():
    given, options = draw("gated_delta feature", 5, dk=8, dv=8)
    given = {name: a.float() for name, a in given.items()}
    y, states = recurrence(**given, **options, keep="every", backend="cpu")
    want, every = recurrence(**given, **options, keep="every", backend="eager")
    assert off(y, want) < GRADIENT
    assert off(states, every) < GRADIENT
    empty = {name: a if name == "past" else a[:, :0] for name, a in given.items()}
    assert recurrence(**empty, **options, keep="every", backend="cpu")[1].shape == (2, 0, 2, 8, 8)


def test_a_gradient_of_the_state_alone_and_second_derivatives():
    given, options = draw("gated_delta feature", 33, B=1, dk=4, dv=4)
    leaves = {name: a.float().requires_grad_() for name, a in given.items()}

    def twice(backend):
        y, state = recurrence(**leaves, **options, backend=backend)
        first = torch.autograd.grad(state.square().sum() + y[:, 0].sum(), list(leaves.values()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values()))

    for got, want in zip(twice("cpu"), twice("eager"), strict=True):
        assert off(got, want) < 1e-4


def test_compiles_without_graph_breaks():
    given, options = draw("gated_delta head", 40, dk=4, dv=6)
    given = {name: a.float().requires_grad_() for name, a in given.items()}
    program = torch.compile(lambda: recurrence(**given, **options), fullgraph=True, backend="aot_eager")
    want, _ = recurrence(**given, **options)
    y, _ = program()
    assert off(y, want) < GRADIENT
    y.sum().backward()
    assert bool(given["k"].grad.isfinite().all())


def test_what_the_kernel_lacks_is_named():
    wide = torch.ones(1, 2, 1, 257)
    with pytest.raises(MixerError, match="its kernel takes heads of at most 256 features"):
        recurrence(wide, wide, wide, backend="cpu")
    one = torch.ones(1, 2, 1, 4, requires_grad=True)
    with pytest.raises(MixerError, match="no keep='every' with gradients or cu_seqlens"):
        recurrence(one, one, one, keep="every", backend="cpu")
    with pytest.raises(MixerError, match="float32"):
        recurrence(one.double(), one, one, backend="cpu")


def test_ends_that_lead_out_of_the_row_never_reach_the_kernel():
    one = torch.ones(1, 5, 1, 4)
    for ends in ([0, 9], [3, 5], [0, 4, 2, 5]):
        with pytest.raises(MixerError, match="the ends of documents must rise from 0 to 5"):
            torch.ops.tokenmix.recurrence(one, one, one, None, None, None, None, torch.tensor(ends), True, 1.0, False)


EACH, SWEEP = 60, 20


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(EACH * i, marks=pytest.mark.slow) for i in range(1, SWEEP))], ids=str
)
def test_random_calls(first):
    """Rules, shapes, groups, masks, documents and layouts at random; ``check_random(seed)`` repeats a failure."""
    for seed in range(first, first + EACH):
        check_random(seed)


def check_random(seed: int) -> None:
    rng = random.Random(seed)
    heads = rng.choice([(1, 1, 1), (2, 2, 2), (1, 1, 3), (2, 2, 4), (4, 2, 2), (2, 1, 4)])
    T, rule = rng.choice([0, 1, 2, 7, 16, 17, 50, 63, 65, 130, 200]), rng.choice([*RULES])
    rows, documents = rng.choice([1, 1, 2, 3]), rng.random() < 0.25
    given, options = draw(
        rule,
        T,
        B=1 if documents else rows,
        heads=heads,
        dk=rng.choice([1, 3, 8, 16, 31, 32, 64, 100]),
        dv=rng.choice([1, 2, 8, 16, 33, 48, 96]),
        seed=seed,
    )
    given = {name: a.float() for name, a in given.items()}
    size = given["q"].shape[:2]
    if rng.random() < 0.5:
        options["key_mask"] = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < rng.choice([0.1, 0.7])
    if rng.random() < 0.3:
        options["positions"] = torch.arange(T).remainder(rng.choice([1, 5, 40])).expand(size)
    if documents:
        ends = sorted(rng.randint(0, T) for _ in range(rng.choice([0, 1, 4])))
        options["cu_seqlens"] = torch.tensor([0, *ends, T])
        given["past"] = given["past"].expand(len(ends) + 1, -1, -1, -1)
    for name in ("past", "beta", "decay"):
        if rng.random() < 0.2:
            given.pop(name, None)
    for name in "qkv":
        if rng.random() < 0.3:
            given[name] = torch.stack([given[name], given[name]], 2)[:, :, rng.choice([0, 1])]
    y, state, grads = derive(recurrence, given, **options, backend="cpu")
    want, last, wanted = derive(recurrence, {name: a.double() for name, a in given.items()}, **options, backend="eager")
    told = f"seed {seed}: {rule} {[(name, tuple(a.shape)) for name, a in given.items()]} {options}"
    largest = max((float(g.abs().max()) for g in wanted.values() if g.numel()), default=0.0)  # some cancel to 0
    for name, got, right in (("output", y, want), ("state", state, last)):
        assert got.numel() == 0 or off(got, right) < ADVERSARIAL, f"{name}, {told}"
    for name, grad in grads.items():
        error = float((grad.double() - wanted[name]).abs().max()) if grad.numel() else 0.0
        assert error <= ADVERSARIAL * largest, f"{name}, {told}"
