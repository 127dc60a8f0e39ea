"""Test streaming on the C kernels.

Any cuts give the parallel form, for any keys; states are the eager ones, and stay values.
"""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from kernel_checks import adversarial
from tokenmix import MIXERS, MixerError, use_backend
from tokenmix.functional import aft_chunk
from tokenmix.functional import linear as linear_form
from tokenmix.functional.short_conv import short_conv_chunk
from tokenmix.functional.sums import kernel_attention as hydra_sums
from tokenmix.kernels.cpu import aft_full as full
from tokenmix.kernels.cpu import aft_simple as scan
from tokenmix.kernels.cpu import decode as step
from tokenmix.mixers import build_mixer
from tokenmix.testing import PROMISES, run_promise, subject
from tokenmix.testing.subject import Subject

ROWS = {
    "aft_simple": ("aft_simple", {}),
    "aft_simple_plain": ("aft_simple", {"gate": None}),
    "aft_simple_tanh": ("aft_simple", {"gate": "tanh"}),
    "aft_local": ("aft_local", {"window": 9, "max_len": 600, "init_std": 0.5}),
    "aft_local_0": ("aft_local", {"window": 0, "max_len": 600}),
    "aft_local_1_tanh": ("aft_local", {"window": 1, "max_len": 600, "gate": "tanh", "rank": None}),
    "aft_local_40": ("aft_local", {"window": 40, "max_len": 600, "init_std": 0.5}),
    "aft_local_none": ("aft_local", {"window": 9, "max_len": 600, "outside": "none"}),
    "aft_conv": ("aft_conv", {"heads": 4, "kernel_size": 7, "reparam": False, "init_std": 1.0}),
    "aft_conv_1": ("aft_conv", {"heads": 1, "kernel_size": 35}),
    "aft_conv_none": ("aft_conv", {"heads": 4, "kernel_size": 7, "outside": "none", "reparam": False, "init_std": 1.0}),
    "aft_conv_wide": ("aft_conv", {"heads": 72, "kernel_size": 3, "reparam": False, "init_std": 1.0}),
    "aft_full": ("aft_full", {"max_len": 600, "init_std": 0.5}),
    "hydra": ("hydra", {}),
    "hydra_mean": ("hydra", {"feature": "mean"}),
    "hydra_identity": ("hydra", {"feature": "identity", "normalise": True}),
    "hydra_softmax": ("hydra", {"feature": "sigmoid/softmax"}),
    "polynl": ("polynl", {}),
    "linear": ("linear", {"heads": 4}),
    "linear_1": ("linear", {"heads": 1}),
    "linear_wide": ("linear", {"heads": 72}),
}
TOL = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
every_row = pytest.mark.parametrize("row", list(ROWS))


def built(row: str, dim: int = 72, dtype: torch.dtype = torch.float32):
    name, options = ROWS[row]
    torch.manual_seed(0)
    return build_mixer(name, dim, causal=True, **options).eval().to(dtype)


@contextlib.contextmanager
def counted(row: str):
    """Counts the calls of the C kernel that serves this row: a test that ran on the eager form has tested nothing."""
    name = "simple" if row == "hydra_softmax" else MIXERS[ROWS[row][0]].facts.kernels.step
    with mock.patch.object(step, name, wraps=getattr(step, name)) as spy:
        yield spy


def stream(mixer, x, cuts, state=None, **given):
    state, outputs, at = mixer.init_state(x.shape[0]) if state is None else state, [], 0
    for n in cuts:
        y, state = mixer.extend(x[:, at : at + n], state, **{k: a[:, at : at + n] for k, a in given.items()})
        outputs.append(y)
        at += n
    return torch.cat(outputs, 1), state


def off(a, b) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))


@every_row
@pytest.mark.parametrize("dtype", list(TOL), ids=str)
def test_streaming_in_any_cuts_is_the_parallel_form_and_the_eager_stream(row, dtype):
    mixer, x = (
        built(row, dtype=dtype),
        (2 * torch.randn(3, 40, 72, generator=torch.Generator().manual_seed(1))).to(dtype),
    )
    holes = torch.rand(3, 40, generator=torch.Generator().manual_seed(2)) > 0.2
    holes[0, :17], holes[1, 30:], holes[2, 0] = False, False, True
    with torch.no_grad():
        for given in ({}, {"key_mask": holes}):
            seen = given.get("key_mask", torch.ones(3, 40, dtype=torch.bool))
            with use_backend("eager"):
                want = built(row, dtype=torch.float64)
                want.load_state_dict(mixer.state_dict())
                want, eager = want(x.double(), **given)[seen], stream(mixer, x, (1,) * 40, **given)[1]
            for cuts in ((1,) * 40, (5, 1, 30, 4), (40,), (2,) * 20):
                with counted(row) as spy, mock.patch.object(full, "extend", wraps=full.extend) as long:
                    got, state = stream(mixer, x, cuts, **given)
                calls = spy.call_count + long.call_count
                if given and row.startswith(
                    ("aft_local", "aft_conv")
                ):  # a ring takes a chunk whose mask has a hole in torch
                    assert 0 < calls <= len(cuts) or cuts == (40,)
                else:
                    assert calls == len(cuts)
                assert off(got[seen], want) < TOL[dtype], cuts
                for a, b in zip(state, eager, strict=True):
                    assert (a.dtype, a.shape) == (b.dtype, b.shape)
                    assert a.numel() == 0 or off(a, b) < TOL[dtype]


@every_row
def test_long_streams_and_rows_at_different_positions(row):
    mixer, x = (
        built(row, dim=72 if "wide" in row else 20),
        torch.randn(2, 530, 72 if "wide" in row else 20, generator=torch.Generator().manual_seed(1)),
    )
    with torch.no_grad():
        want = mixer(x)
        for cuts in ((530,), (1,) * 30 + (500,), (70, 3, 67, 390)):
            assert off(stream(mixer, x, cuts)[0], want) < 3e-6
        states = [stream(mixer, x[i : i + 1, :n], (n,))[1] for i, n in enumerate((60, 60))]
        if row != "aft_full":  # histories of two lengths are padded by the contract's own test below
            states[1] = stream(mixer, x[1:, :25], (25,))[1]
            state = pytree.tree_map(lambda *a: torch.cat(a), *states)
            tail = torch.cat([x[:1, 60:70], x[1:, 25:35]])
            assert off(stream(mixer, tail, (1,) * 10, state)[0], torch.cat([want[:1, 60:70], want[1:, 25:35]])) < 3e-6


@every_row
@pytest.mark.parametrize(
    "promise",
    [
        "streaming_equals_parallel",
        "rows_at_different_positions",
        "state_is_a_value",
        "reorder_picks_rows",
        "merge_joins_stretches",
    ],
)
def test_the_promises_of_streaming(row, promise):
    name, options = ROWS[row]
    options = {"causal": True, **options} | ({"heads": 4} if options.get("heads") == 72 else {})
    single = {
        "build": functools.partialmethod(Subject.build, dtype=torch.float32),
        "x": functools.partialmethod(Subject.x, dtype=torch.float32),
    }
    with torch.no_grad(), counted(row) as spy, mock.patch.multiple(Subject, **single):
        result = run_promise(subject(name, options, dim=8), promise, PROMISES[promise])
    assert result.status == "kept" and spy.called or "merge" in promise and result.status != "failed", str(result)


def keys_of(case: str, T: int, D: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(4)
    ramp, late = torch.linspace(-100, 100, T)[None, :, None].expand(2, T, D), torch.full((2, T, D), -100.0)
    late[:, int(0.9 * T)] = 100.0
    huge = 1e4 * torch.randn(2, T, D, generator=draw)
    return {
        "uniform": torch.rand(2, T, D, generator=draw) * 200 - 100,
        "up": ramp,
        "down": -ramp,
        "late": late,
        "huge": huge,
        "1e30": 1e26 * huge,
    }[case]


@pytest.mark.parametrize("case", ["uniform", "up", "down", "late", "huge", "1e30"])
@pytest.mark.parametrize("per_head", [False, True])
def test_adversarial_keys_and_weights(case, per_head):
    """Every AFT step on one set of keys, |w| up to 60, against the literal sums in float64."""
    T, D, R = 90, 24, 31
    h = 4 if per_head else D
    k, draw = keys_of(case, T, h), torch.Generator().manual_seed(5)
    v, gate = torch.randn(2, T, D, generator=draw), torch.randn(2, T, D, generator=draw)
    w = torch.rand(h if per_head else 1, T, T, generator=draw).double() * 120 - 60
    t = torch.arange(T)
    near = (t[:, None] - t <= R) & (t[:, None] >= t)
    forms = {"simple": 0 * w, "ring": torch.where(near, w, 0.0), "full": w, "only": torch.where(near, w, -torch.inf)}
    for form, weight in forms.items():
        if per_head and form in ("simple", "full"):
            continue
        z = k.double().transpose(1, 2)[:, :, None] + weight.where(t[:, None] >= t, -torch.inf)
        p = z.softmax(-1).repeat_interleave(D // h, 1)
        want = (p @ v.double().transpose(1, 2)[..., None])[..., 0].transpose(1, 2) * gate.double().sigmoid()
        scale = (p @ v.double().abs().transpose(1, 2)[..., None])[..., 0].transpose(1, 2).amax(-1, keepdim=True)
        for cuts in ((1,) * T, (3,) * (T // 3), (40, T - 40), (T,)):
            got = streamed(form, gate, k, v, weight, near, R, cuts, h if per_head else 1)
            assert float(((got - want).abs() / scale).max()) < 1e-5, (form, cuts[0])


def streamed(form, q, k, v, w, near, R, cuts, heads):
    """The outputs of one functional step after the other."""
    B, T, D = q.shape
    h, at, outputs = k.shape[2], 0, []
    past = aft_chunk.empty_past(B, h, D)
    size = 0 if form == "full" else R
    kept = torch.zeros(B, size, h), torch.zeros(B, size, D), torch.zeros(B, size, dtype=torch.bool)
    for n in cuts:
        cut = slice(at, at + n)
        new = k[:, cut].contiguous(), v[:, cut].contiguous(), torch.ones(B, n, dtype=torch.bool)
        asked = q[:, cut].contiguous()
        if form == "simple":
            y, past = aft_chunk.aft_simple_chunk(asked, new[0], new[1], past)
        elif form == "full":
            y, kept = aft_chunk.aft_chunk(asked, new, kept, w[None, :, cut, : at + n], gate="sigmoid")
        else:
            rows = torch.nn.functional.pad(w[:, cut], (R, 0), value=-torch.inf)[None, :, :, at : at + n + R]
            close = torch.nn.functional.pad(near[cut], (R, 0))[None, None, :, at : at + n + R]
            rows = torch.where(close, rows, 0.0)
            y, kept, past = aft_chunk.ring_chunk(
                asked, new, kept, past, rows, close, only_near=form == "only", heads=heads, gate="sigmoid"
            )
        outputs.append(y)
        at += n
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("row", ["aft_simple", "aft_local", "aft_conv", "aft_full", "hydra", "linear"])
def test_what_a_masked_token_holds_has_no_influence(row):
    mixer, x = built(row), torch.randn(2, 30, 72)
    mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[1, :5] = False
    with torch.no_grad():
        want = stream(mixer, x, (1,) * 30, key_mask=mask)[0]
        for nonsense in (1e30, float("nan")):
            got = stream(mixer, torch.where(mask[..., None], x, nonsense), (1,) * 10 + (20,), key_mask=mask)[0]
            assert off(got[mask], want[mask]) < 3e-6


@pytest.mark.parametrize("L", [1, 7, 300])
def test_the_number_of_threads_does_not_change_a_bit(L):
    B, D, R, before, found = 2, 160, 40, torch.get_num_threads(), []
    q, k, v = (torch.randn(B, L, D) for _ in range(3))
    kept = torch.randn(B, R, D), torch.randn(B, R, D), torch.rand(B, R) > 0.2
    past, live, w = (
        aft_chunk.empty_past(B, D, D),
        torch.ones(B, L, dtype=torch.bool),
        torch.randn(1, 1, L, R + L).double(),
    )
    sums = torch.randn(B, D).double(), torch.ones(B, dtype=torch.long)
    matrices = torch.randn(B, 4, 40).double(), torch.rand(B, 4, 41, 40).double()
    heads = (
        aft_chunk.empty_past(B, 4, D),
        (kept[0][..., :4].contiguous(), *kept[1:]),
        w.expand(1, 4, -1, -1).contiguous(),
    )
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results = [
            step.simple(q, k, v, live, past),
            step.full(q, (k, v, live), kept, w),
            step.ring(q, (k, v, live), kept, past, w, None, heads=False),
        ]
        results.append(step.ring(q, (k[..., :4].contiguous(), v, live), heads[1], heads[0], heads[2], None, heads=True))
        results.append(step.hydra(q, k, v, live, sums, cosine=True, mean=True, eps=1e-6))
        results.append(step.linear(q, k, v, live, matrices))
        found.append(pytree.tree_leaves(results))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_with_gradients_it_is_the_eager_form():
    for row in ("aft_simple", "aft_local", "aft_conv", "aft_full", "hydra", "linear"):
        mixer, x = built(row), torch.randn(2, 6, 72, requires_grad=True)
        with counted(row) as spy:
            y, state = stream(mixer, x, (2, 1, 3))
            assert (spy.called, y.requires_grad) == (False, True)
            with torch.no_grad():
                stream(mixer, x, (1, 2), state)
            assert spy.called
            plain = stream(mixer.requires_grad_(False), x.detach(), (1,))[1]
            assert not any(a.requires_grad for a in plain)


def test_the_eager_backend_and_transforms_stay_eager():
    past, x = aft_chunk.empty_past(1, 8, 8), torch.randn(1, 1, 8)
    with mock.patch.object(step, "simple", wraps=step.simple) as spy:
        with use_backend("eager"):
            aft_chunk.aft_simple_chunk(x, x, x, past)
        torch.func.vmap(lambda a: aft_chunk.aft_simple_chunk(a, a, a, past)[0])(x[None])
        aft_chunk.aft_simple_chunk(*[x.double()] * 3, past)
        with FlopCounterMode(display=False):
            aft_chunk.aft_simple_chunk(x, x, x, past)
        assert not spy.called
        with use_backend("cpu"):
            aft_chunk.aft_simple_chunk(x, x, x, past)
        assert spy.called


@pytest.mark.parametrize("row", ["aft_simple", "aft_local", "aft_conv", "hydra", "linear"])
def test_decoding_compiles_whole(row):
    mixer, x = built(row, dim=72), torch.randn(2, 1, 72)
    with torch.no_grad():
        _, state = stream(mixer, torch.randn(2, 12, 72), (12,))
        run = torch.compile(mixer.extend, fullgraph=True, backend="aot_eager")
        got, want = run(x, state), mixer.extend(x, state)
    assert all(
        torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5)
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
    )


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("window", [None, 0, 3, 50])
def test_the_weights_of_pairs_are_those_of_the_bias(dtype, window):
    draw = torch.Generator().manual_seed(0)
    u, v, table = (torch.randn(shape, generator=draw).to(dtype) for shape in ((40, 70), (45, 70), (40, 45)))
    at, places = torch.randint(0, 40, (2, 5), generator=draw), torch.randint(0, 40, (2, 9), generator=draw)
    every = torch.cat([places, at], 1)
    near = torch.ones(2, 5, 14, dtype=torch.bool) if window is None else (every[:, None] - at[..., None]).abs() < window
    for first, second, every_pair in ((u, v, u.double() @ v.double().T), (table, None, table.double())):
        w, inside, after = aft_chunk.pair_weights(first, second, at, places, window=window, keep=9)
        assert torch.allclose(
            w[:, 0], torch.where(near, every_pair[at[..., None], every[:, None]], 0.0), rtol=1e-13, atol=1e-13
        )
        assert inside is None if window is None else torch.equal(inside[:, 0], near)
        assert torch.equal(after, every[:, -9:])


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
def test_the_weights_of_taps_are_those_of_the_filter(dtype):
    kernel = torch.randn(3, 6).to(dtype)
    at, places = torch.tensor([[7, 8, 9], [4, 30, 5]]), torch.tensor([[2, 3, 4, 5], [0, 4, 1 << 62, -(1 << 62)]])
    got = aft_chunk.tap_weights(kernel, at, places)
    with use_backend("eager"):
        want = aft_chunk.tap_weights(kernel, at, places)
    back = at[:, :, None] - torch.cat([places, at], 1)[:, None]
    assert torch.equal(got[1][:, 0], (back >= 0) & (back < 6))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("wrong", [-1, 600, 1 << 40])
@pytest.mark.parametrize("row", ["aft_full", "aft_local"])
def test_a_state_that_stands_outside_of_the_bias_is_an_error(row, wrong):
    mixer = built(row)
    with torch.no_grad():
        _, state = stream(mixer, torch.randn(1, 5, 72), (5,))
        assert aft_chunk.pair_weights(*mixer.bias(), torch.full((1, 1), 5), torch.full((1, 3), wrong), keep=3) is None
        with pytest.raises((IndexError, RuntimeError)):
            mixer.extend(torch.randn(1, 1, 72), state._replace(positions=torch.full_like(state.positions, wrong)))


def test_shapes_that_do_not_fit_never_reach_the_library():
    q, past = torch.randn(2, 1, 8), aft_chunk.empty_past(2, 8, 8)
    wrong = [torch.randn(2, 1, 7), torch.randn(1, 1, 4)]
    for k in wrong:
        with pytest.raises(RuntimeError):
            aft_chunk.aft_simple_chunk(q, k, k, past)
    with pytest.raises((RuntimeError, ValueError)):
        hydra_sums.extend_chunk(
            q,
            wrong[0],
            wrong[0],
            hydra_sums.empty_sums(2, 8, 8, softmax=False),
            valid=None,
            heads=8,
            feature="cosine",
            normalise=False,
            eps=1e-6,
        )
    with pytest.raises((RuntimeError, ValueError)):
        linear_form.linear_chunk(
            q,
            wrong[0],
            wrong[0],
            (torch.zeros(2, 2, 4).double(), torch.zeros(2, 2, 5, 4).double()),
            heads=2,
            feature="elu",
            key_mask=None,
        )


CALLED = {"aft_simple": ("simple",), "aft_local": ("ring", "pairs"), "aft_local_none": ("ring", "pairs")}
CALLED |= {"aft_conv": ("ring", "taps"), "aft_full": ("full",), "hydra": ("hydra",), "linear": ("linear",)}
CALLED |= {"short_conv": ("conv",)}
RESIZED = {("pairs", 0, "one row"), ("pairs", 1, "one row"), ("conv", 0, "one short"), ("taps", 0, "one row")}
RESIZED |= {("taps", i, "one short") for i in range(3)} | {("pairs", i, "one short") for i in (2, 3)}
"""Tensors whose size is a size of the call, so that another one is another call."""


def arguments_of(row: str, name: str) -> tuple[list, dict]:
    """The arguments of the last call of a step kernel that the stream of a row makes."""
    with mock.patch.object(step, name, wraps=getattr(step, name)) as spy, torch.no_grad():
        if row == "short_conv":
            past = torch.randn(3, 2, 8), torch.ones(3, 2).bool(), torch.zeros(3, 2).long()
            short_conv_chunk(torch.randn(3, 1, 8), torch.randn(8, 3), past[1][:, :1], past[2][:, :1], past)
        else:
            stream(built(row), torch.randn(3, 4, 72), (3, 1), key_mask=torch.ones(3, 4, dtype=torch.bool))
    return list(spy.call_args.args), dict(spy.call_args.kwargs)


def wrong_forms(a: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor in forms that a kernel would read wrong, or beyond."""
    found = {"another dtype": a.to(torch.int16), "meta": a.to("meta"), "one row": a[:1].contiguous()}
    found |= {"one short": a[..., :-1].contiguous(), "expanded": a[:1].expand_as(a)}
    return found | {"a step apart": torch.stack([a, a], -1)[..., 0]}


@pytest.mark.parametrize(("row", "name"), [(row, name) for row, names in CALLED.items() for name in names])
def test_a_step_kernel_called_by_hand_refuses_what_it_would_read_beyond(row, name):
    """Of every tensor that it takes. The address of one on meta is 0, and the process died of it."""
    args, options = arguments_of(row, name)
    leaves, spec = pytree.tree_flatten(args)
    tried = 0
    for i, leaf in enumerate(leaves):
        for how, other in (wrong_forms(leaf) if isinstance(leaf, torch.Tensor) else {}).items():
            fits = other.dtype is leaf.dtype and other.shape == leaf.shape and other.is_cpu and other.is_contiguous()
            if fits or (name, i, how) in RESIZED or how == "one row" and leaf.ndim == 4:  # one row serves all
                continue
            wrong = pytree.tree_unflatten([*leaves[:i], other, *leaves[i + 1 :]], spec)
            with pytest.raises(MixerError, match=rf"^the C kernel step_{name} takes .*, got "):
                getattr(step, name)(*wrong, **options)
            tried += 1
    assert tried >= 9


def test_a_million_tokens_do_not_drift():
    """The sums of a stream are float64: equal tokens keep giving the same answer, in steps and in chunks."""
    v, zero, past = torch.full((1, 50, 8), 0.1), torch.zeros(1, 50, 8), aft_chunk.empty_past(1, 8, 8)
    for _ in range(2000):
        y, past = aft_chunk.aft_simple_chunk(zero, zero, v, past, gate=None)
    assert float((y - 0.1).abs().max()) < 1e-8
    assert float(past[2].max()) == 100_000


def test_the_step_and_the_scan_give_one_state():
    q, k, v = (torch.randn(2, 70, 20, generator=torch.Generator().manual_seed(i)) for i in range(3))
    past = aft_chunk.empty_past(2, 20, 20)
    (a, s), (b, r, _) = step.simple(q, k, v, None, past), scan.extend(q, k, v, None, past)
    assert off(a, b) < 1e-6
    assert all(off(x, y) < 1e-6 for x, y in zip(s, r, strict=True))


def test_adversarial_promise_with_the_library_at_hand():
    adversarial("aft_simple", {"causal": True}, dim=8, length=40)
