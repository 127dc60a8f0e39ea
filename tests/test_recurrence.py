"""Test gated linear recurrences: against their equation at lengths around a chunk, documents, masks, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmix import MixerError, reference
from tokenmix.functional import recurrence
from tokenmix.testing.tolerances import ADVERSARIAL, BY_DTYPE, INFLUENCE

LENGTHS = (1, 31, 32, 33, 257)
RULES = {
    "linear": {},
    "gated head": {"rule": "gated", "decay": "head"},
    "gated feature": {"rule": "gated", "decay": "feature"},
    "delta": {"rule": "delta"},
    "gated_delta head": {"rule": "gated_delta", "decay": "head"},
    "gated_delta feature": {"rule": "gated_delta", "decay": "feature"},
}
GRADIENT = 1e-6
"""The largest relative error of a gradient in float32 sums, relative to the largest of its tensor."""


def draw(
    rule: str, T: int, *, B: int = 2, heads: tuple[int, int, int] = (2, 2, 2), dk: int = 8, dv: int = 8, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Draw the tensors of one call in float64, unit keys, and its options."""
    g = torch.Generator().manual_seed(seed)
    hq, hk, hv = heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    kind = RULES[rule]
    given = {
        "q": normal(B, T, hq, dk),
        "k": torch.nn.functional.normalize(normal(B, T, hk, dk), dim=-1),
        "v": normal(B, T, hv, dv),
        "past": normal(B, hv, dk, dv),
    }
    if kind.get("decay"):
        shape = (B, T, hv) if kind["decay"] == "head" else (B, T, hv, dk)
        spread = torch.rand(shape, generator=g, dtype=torch.float64)
        some = torch.rand(shape, generator=g)
        decay = -(spread**4)
        given["decay"] = torch.where(some < 0.05, -1e4, torch.where(some > 0.9, 0.0, decay))
    if "delta" in rule:
        given["beta"] = 2 * torch.rand(B, T, hv, generator=g, dtype=torch.float64)
    return given, {"rule": kind.get("rule", rule)}


def derive(form: Any, given: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return outputs, state, and the gradients of a weighted sum of both."""
    leaves = {name: a.detach().clone().requires_grad_() for name, a in given.items()}
    y, state = form(**leaves, **options)
    draw = torch.Generator().manual_seed(5)
    weigh = [torch.randn(a.shape, generator=draw, dtype=torch.float64).to(a.dtype) for a in (y, state)]
    total = (y * weigh[0]).sum() + (state * weigh[1]).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return y.detach(), state.detach(), dict(zip(leaves, grads, strict=True))


def off(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def compare(given: dict[str, Tensor], dtype: torch.dtype, tol: float, **options: Any) -> None:
    y, state, grads = derive(recurrence, {name: a.to(dtype) for name, a in given.items()}, **options)
    options.pop("backend", None)
    exact = {name: a.to(dtype).double() for name, a in given.items()}
    want, wanted_state, wanted = derive(reference.recurrence, exact, **options)
    assert y.dtype == state.dtype == dtype
    assert off(y, want) < tol
    assert off(state, wanted_state) < tol
    for name, grad in grads.items():
        assert off(grad, wanted[name]) < tol, name


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_loop(rule, T):
    given, options = draw(rule, T)
    compare(given, torch.float64, BY_DTYPE[torch.float64], **options)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_in_float32(rule):
    given, options = draw(rule, 129, dk=16, dv=24)
    compare(given, torch.float32, GRADIENT, **options, backend="eager")


@pytest.mark.parametrize("heads", [(1, 1, 2), (2, 2, 4), (4, 2, 2), (6, 1, 3), (1, 1, 1)])
def test_groups_of_heads(heads):
    given, options = draw("gated_delta feature", 9, heads=heads, dk=3, dv=5)
    compare(given, torch.float64, BY_DTYPE[torch.float64], **options)


@pytest.mark.parametrize("rule", RULES)
def test_a_masked_token_is_the_identity(rule):
    given, options = draw(rule, 40, dk=4, dv=6)
    valid = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.6
    spoiled = {
        name: a if name == "past" else torch.where(valid.view(2, 40, *[1] * (a.ndim - 2)), a, float("nan"))
        for name, a in given.items()
    }
    y, state = recurrence(**spoiled, **options, key_mask=valid)
    assert bool((y[~valid] == 0).all())
    for b in range(2):
        row = {name: a[b : b + 1] if name == "past" else a[b : b + 1, valid[b]] for name, a in given.items()}
        want, last = recurrence(**row, **options)
        assert off(y[b, valid[b]], want[0]) < BY_DTYPE[torch.float64]
        assert off(state[b], last[0]) < BY_DTYPE[torch.float64]


@pytest.mark.parametrize("rule", RULES)
def test_documents_start_anew(rule):
    """By cu_seqlens, with a state each, an empty one included, and by positions."""
    given, options = draw(rule, 50, B=1, dk=4, dv=6)
    ends = torch.tensor([0, 7, 7, 40, 50])
    pasts = torch.randn(4, *given["past"].shape[1:], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y, state = recurrence(**{**given, "past": pasts}, **options, cu_seqlens=ends)
    for n in range(4):
        part = {name: a[:, ends[n] : ends[n + 1]] for name, a in given.items() if name != "past"}
        want, last = recurrence(**part, past=pasts[n : n + 1], **options)
        assert torch.allclose(y[:, ends[n] : ends[n + 1]], want)
        assert torch.allclose(state[n], last[0])
    positions = torch.cat([torch.arange(n) for n in (7, 33, 10)])[None]
    again, last = recurrence(**given, **options, positions=positions)
    fresh, states = recurrence(**{**given, "past": torch.zeros_like(pasts)}, **options, cu_seqlens=ends)
    assert torch.allclose(again, fresh)
    assert torch.allclose(last, states[3:])


@pytest.mark.parametrize("rule", RULES)
def test_any_split_of_a_stream(rule):
    given, options = draw(rule, 70, dk=4, dv=6)
    past, parts = given["past"], []
    want, last = recurrence(**given, **options)
    for part in (slice(0, 1), slice(1, 34), slice(34, 34), slice(34, 70)):
        some = {name: a[:, part] for name, a in given.items() if name != "past"}
        y, past = recurrence(**some, past=past, **options)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), want)
    assert torch.allclose(past, last)


@pytest.mark.parametrize("rule", RULES)
def test_the_state_after_every_token(rule):
    given, options = draw(rule, 6, dk=4, dv=6)
    y, states = recurrence(**given, **options, keep="every")
    assert states.shape == (2, 6, 2, 4, 6)
    for t in range(6):
        some = {name: a if name == "past" else a[:, : t + 1] for name, a in given.items()}
        want, last = recurrence(**some, **options)
        assert torch.allclose(y[:, t], want[:, t])
        assert torch.allclose(states[:, t], last)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_a_stream_goes_on_from_any_token_of_a_chunk(backend):
    """As if the tokens after it had never come, by masks and documents too; the states take 4 B T H dk dv bytes."""
    given, options = draw("gated_delta feature", 9, dk=4, dv=6)
    given = {name: a.float() for name, a in given.items()}
    past, valid = given.pop("past"), torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.7
    given |= {"key_mask": valid, "positions": torch.tensor([[*range(9)], [6, 7, 0, 1, 2, 3, 0, 1, 2]])}
    want, last = recurrence(**given, **options, past=past, backend=backend)
    chunk = {name: a[:, :6] for name, a in given.items()}
    y, states = recurrence(**chunk, **options, past=past, keep="every", backend=backend)
    assert off(y, want[:, :6]) < GRADIENT
    assert states.untyped_storage().nbytes() == 4 * 2 * 6 * 2 * 4 * 6
    for n in range(1, 6):
        rest = {name: a[:, n:] for name, a in given.items()}
        y, state = recurrence(**rest, **options, past=states[:, n - 1], backend=backend)
        assert off(y, want[:, n:]) < GRADIENT
        assert off(state, last) < GRADIENT


def test_heads_before_tokens():
    given, options = draw("gated_delta feature", 9, dk=4, dv=6)
    swapped = {name: a if name == "past" else a.transpose(1, 2) for name, a in given.items()}
    want, state = recurrence(**given, **options)
    y, last = recurrence(**swapped, **options, layout="bhtd")
    assert torch.equal(y, want.transpose(1, 2))
    assert torch.equal(last, state)


def test_unit_keys_as_public_models_have_them():
    given, options = draw("gated_delta head", 9, dk=4, dv=6)
    short = {**given, "k": 1e-4 * given["k"], "q": 100 * given["q"]}
    unit = {name: a * (a.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for name, a in short.items() if name in "qk"}
    want, _ = recurrence(**{**given, **unit}, **options)
    assert torch.allclose(recurrence(**short, **options, l2norm=True)[0], want)
    at_zero = torch.zeros(1, 3, 1, 4, requires_grad=True)
    recurrence(at_zero, at_zero, torch.ones(1, 3, 1, 4), rule="delta", l2norm=True)[0].sum().backward()
    assert at_zero.grad is not None
    assert bool(at_zero.grad.isfinite().all())


def test_a_nan_reaches_the_tokens_after_it_in_its_document_only():
    given, options = draw("gated_delta feature", 30, dk=4, dv=6)
    clean, _ = recurrence(**given, **options)
    positions = torch.arange(30) % 10
    for name in ("k", "v", "decay", "beta"):
        bad = {**given, name: given[name].clone()}
        bad[name][0, 12] = float("nan")
        bad["past"] = bad["past"].clone().requires_grad_()
        y, state = recurrence(**bad, **options)
        assert bool(y[0, 12:].isnan().all())
        assert bool(state[0].isnan().all())
        assert float((y[0, :12] - clean[0, :12]).detach().abs().max()) < INFLUENCE
        assert torch.equal(y[1], clean[1])
        y[:, :12].sum().backward()
        assert bool(bad["past"].grad.isfinite().all())
        y, state = recurrence(**bad, **options, positions=positions.expand(2, 30))
        assert bool(y[0, 12:20].isnan().all())
        assert bool(y[0, 20:].isfinite().all())
        assert bool(state.isfinite().all())


def test_identities():
    """Orthonormal keys are a memory; beta 0 only decays; equal decays of features are a decay of the head."""
    keys = torch.eye(8, dtype=torch.float64)[None, :, None]
    v = torch.randn(1, 8, 1, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, state = recurrence(keys, keys, v, rule="delta", scale=1.0)
    assert torch.allclose(state[0, 0], v[0, :, 0])
    given, options = draw("gated_delta head", 9, dk=4, dv=6)
    _, state = recurrence(**{**given, "beta": torch.zeros_like(given["beta"])}, **options)
    assert torch.allclose(state, given["past"] * given["decay"].sum(1).exp()[..., None, None])
    want, _ = recurrence(**given, **options)
    spread = {**given, "decay": given["decay"][..., None].expand(-1, -1, -1, 4)}
    assert torch.allclose(recurrence(**spread, **options)[0], want)
    infinite = {**given, "decay": torch.where(given["decay"] == -1e4, float("-inf"), given["decay"])}
    assert torch.equal(recurrence(**infinite, **options)[0], want)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("rule", ["gated head", "gated_delta head", "gated_delta feature", "delta"])
def test_rows_are_accurate_relative_to_their_own_terms(rule, backend):
    """With beta up to 1, for each row: of sum |weight| |v|, which the signs of weights leave larger than the output."""
    given, options = draw(rule, 257, B=1, heads=(1, 1, 1), dk=16, dv=16)
    given = {name: a.float() for name, a in given.items() if name != "past"}
    if "beta" in given:
        given["beta"] = given["beta"] / 2
    given["k"] = given["k"][:, torch.arange(257) % 7]  # keys that return
    exact = {name: a.double() for name, a in given.items()}
    want, _ = recurrence(**exact, **options)
    one_each = torch.eye(257, dtype=torch.float64)[None, :, None]
    weights = recurrence(**{**exact, "v": one_each}, **options)[0][0, :, 0]
    terms = (weights.abs() @ exact["v"][0, :, 0].abs()).amax(-1)
    error = (recurrence(**given, **options, backend=backend)[0].double() - want)[0, :, 0].abs().amax(-1)
    assert float((error / terms).max()) < ADVERSARIAL


def test_a_state_in_float64_on_request():
    given, options = draw("gated_delta head", 9)
    small = {name: a.to(torch.bfloat16) for name, a in given.items()}
    y, state = recurrence(**{**small, "past": small["past"].float()}, **options)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    y, state = recurrence(**{**small, "past": small["past"].double()}, **options)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float64)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rule": "gru"}, "rule='gru' is unknown; choose one of linear, gated, delta, gated_delta"),
        ({"layout": "tbhd"}, "layout='tbhd' is unknown"),
        ({"keep": "all"}, "keep='all' is unknown; choose one of last, every"),
        ({"scale": -1.0}, "scale must be a positive number"),
        ({"l2norm": 1}, "l2norm must be True or False"),
        ({"q": torch.ones(2, 5, 8)}, "expects q, k .B, T, heads, dk. and v"),
        ({"k": torch.ones(2, 5, 2, 3)}, "one width dk"),
        ({"q": torch.ones(2, 5, 3, 4)}, "the 2 heads of v must be a multiple of the 2 of k, and of the 3 of q"),
        ({"v": torch.ones(2, 5, 3, 4)}, "the 3 heads of v must be a multiple of the 2 of k"),
        ({"decay": torch.ones(2, 5)}, "decay must be .B, T, H. = .2, 5, 2. or"),
        ({"decay": torch.ones(2, 5, 2, 3)}, "decay must be"),
        ({"beta": torch.ones(2, 5, 1)}, "beta must be .B, T, H. = .2, 5, 2."),
        ({"rule": "delta", "decay": torch.ones(2, 5, 2)}, "rule='delta' has no decay; choose 'gated_delta'"),
        ({"rule": "linear", "decay": torch.ones(2, 5, 2)}, "rule='linear' has no decay; choose 'gated'"),
        ({"rule": "gated", "beta": torch.ones(2, 5, 2)}, "rule='gated' has no beta"),
        ({"past": torch.ones(2, 2, 4, 5)}, "expects a state past .2, 2, 4, 4."),
        ({"key_mask": torch.ones(2, 4, dtype=torch.bool)}, "expects a bool key_mask of shape .2, 5."),
        ({"positions": torch.ones(2, 4, dtype=torch.int64)}, "expects integer positions .2, 5."),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens are integers .documents . 1,. for one row"),
        ({"k": torch.ones(2, 5, 2, 4, dtype=torch.int64)}, "expects floating point q, k, v, decay and beta"),
    ],
)
def test_refusals_are_one_line(change, said):
    given = {name: torch.ones(2, 5, 2, 4) for name in "qkv"}
    with pytest.raises(MixerError, match=said) as refusal:
        recurrence(**{**given, **change})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("ends", [[0, 4], [1, 5], [0, 4, 3, 5], [0, 6]])
def test_documents_that_do_not_fill_the_row_are_refused(ends):
    one = torch.ones(1, 5, 2, 4)
    with pytest.raises(MixerError, match="cu_seqlens must rise from 0 to 5, the number of tokens, got"):
        recurrence(one, one, one, cu_seqlens=torch.tensor(ends))


def test_compiles_and_exports_as_primitive_operators():
    given, options = draw("gated_delta feature", 40, dk=4, dv=6)

    class Net(torch.nn.Module):
        def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return recurrence(**given, **options)

    program = torch.export.export(Net(), (given,))
    assert not any("tokenmix" in str(node.target) for node in program.graph.nodes)
    want, state = recurrence(**given, **options)
    y, last = program.module()(given)
    assert torch.allclose(y, want)
    assert torch.allclose(last, state)
