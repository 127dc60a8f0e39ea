"""Test biases for pairs of positions.

Their closed forms, transformers' ALiBi and T5, what FIRE can represent, and the routes by which mixers compute them.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from tokenmix import MIXERS, MixerError, build_mixer, reference
from tokenmix.functional import aft_full, aft_local
from tokenmix.functional import attention as attend
from tokenmix.mixers import Inputs
from tokenmix.models import LM, LMConfig
from tokenmix.positions import (
    PAIR_POSITIONS,
    ALiBi,
    Fire,
    Kerple,
    LearnedPositions,
    Sandwich,
    T5Bias,
    build_pair_positions,
)
from tokenmix.positions.pair import alibi_slopes

FAR = 3000
SPECS = [
    {"name": "alibi"},
    {"name": "alibi", "slope": 0.25, "learned": True},
    {"name": "t5"},
    {"name": "t5", "two_sided": True, "buckets": 12, "max_distance": 40},
    {"name": "kerple"},
    {"name": "kerple", "kind": "power"},
    {"name": "sandwich"},
    {"name": "fire", "hidden": 5, "threshold": 700.0},
]
NAMES = [" ".join(map(str, spec.values())) for spec in SPECS]


def built(spec: dict, heads: int = 3):
    torch.manual_seed(0)
    return build_pair_positions(spec, heads, owner="test").double()


def closed(bias, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """The equation, with the parameters of a module."""
    if isinstance(bias, ALiBi):
        return reference.alibi(t, s, slopes=bias.slopes())
    if isinstance(bias, Kerple):
        r1, r2 = bias.rates(torch.float64)
        return reference.kerple(t, s, r1=r1, r2=r2, kind=bias.kind)
    if isinstance(bias, Sandwich):
        return reference.sandwich(t, s, heads=bias.heads, dim=bias.dim)
    if isinstance(bias, T5Bias):
        rows = (t[:, :, None] - s[:, None]).apply_(lambda distance: t5_bucket(bias, distance))
        return bias.table[rows].movedim(-1, 1)
    assert isinstance(bias, Fire)
    mlp = {name: getattr(bias, name) for name in ("up", "up_bias", "down", "down_bias")}
    return reference.fire(t, s, c=bias.c, limit=bias.length * bias.threshold, **mlp)


def t5_bucket(bias, distance: int) -> int:
    """The row of T5's table for a distance t - s, in Python's numbers."""
    n, side = abs(distance), bias.buckets // 2 if bias.two_sided else bias.buckets
    half = side // 2
    grown = math.log(max(n, 1) / half) / math.log(bias.max_distance / half)
    bucket = n if n < half else min(half + math.floor(grown * (side - half) + 1e-9), side - 1)
    return bucket + (side if bias.two_sided and distance < 0 else 0)


def off(bias) -> float:
    """The largest difference to the equation, near, far, and at both ends of T5's buckets."""
    generator = torch.Generator().manual_seed(1)
    rows, cols = (torch.randint(0, FAR + 1, (2, n), generator=generator) for n in (5, 7))
    cols[:, :3] = rows[:, :3] - torch.tensor([0, 1, 130])  # near, and at both ends of T5's buckets
    cols = cols.clamp_min(0)
    got, want = bias(rows, cols, torch.float64).detach(), closed(bias, rows, cols).detach()
    assert got.shape == want.shape == (2, 3, 5, 7)
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_is_its_closed_form(spec):
    assert off(built(spec)) < 1e-9


class RisingALiBi(ALiBi):
    def of_distance(self, distance, dtype):
        return -super().of_distance(distance, dtype)


class MirroredT5(T5Bias):
    def bucket(self, distance):
        return super().bucket(-distance)


class FireOfTheKey(Fire):
    def between(self, rows, cols, dtype):
        return super().between(cols, rows, dtype).transpose(-1, -2)


@pytest.mark.parametrize(
    "planted", [RisingALiBi(3), MirroredT5(3, two_sided=True, init_std=1.0), FireOfTheKey(3, threshold=700.0)]
)
def test_the_closed_form_tells_planted_bugs(planted):
    assert off(planted.double()) > 1e-2


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_consecutive_positions_are_any_positions(spec):
    bias = built(spec)
    for rows, keys in (((0, 6), 6), ((4, 9), 11), ((700, 705), 3), ((697, 703), 702), ((0, 0), 4), ((0, 3), 0)):
        at = torch.arange(*rows)[None]
        want = bias(at, torch.arange(keys)[None], torch.float64)
        torch.testing.assert_close(bias(rows, keys, torch.float64), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("limit", [1.0, 0.9, 600 / 700, 0.0], ids=["beyond", "between", "at a query", "none"])
def test_gradients_of_consecutive_positions_are_those_of_any(limit):
    """FIRE computes queries below its L, 700 times ``limit``, once for each distance."""
    bias = built({"name": "fire", "hidden": 5, "threshold": 700.0})
    with torch.no_grad():
        bias.length.fill_(limit)
    weight = torch.randn(1, bias.heads, 60, 640, dtype=torch.float64)
    rows, cols = torch.arange(580, 640)[None], torch.arange(640)[None]
    near, far = (
        torch.autograd.grad((bias(*given, torch.float64) * weight).sum(), list(bias.parameters()))
        for given in (((580, 640), 640), (rows, cols))
    )
    torch.testing.assert_close(near, far, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_gradients(spec):
    bias = built(spec)
    params = list(bias.parameters())
    if not params:
        return
    rows, cols = torch.tensor([[0, 3, 900]]), torch.tensor([[0, 1, 2, 905]])

    def run(*values: torch.Tensor) -> torch.Tensor:
        named = dict(zip((n for n, _ in bias.named_parameters()), values, strict=True))
        return torch.func.functional_call(bias, named, (rows, cols, torch.float64))

    assert gradcheck(run, tuple(p.detach().clone().requires_grad_() for p in params))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_half_precision_computes_in_float32(spec, dtype):
    bias = built(spec).to(dtype)
    want = built(spec).to(dtype).double()((600, 604), 604, torch.float64)
    got = bias((600, 604), 604, dtype)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-4)


def test_alibi_slopes_are_transformers():
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in range(1, 33):
        theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32).view(heads, 2)[:, 1]
        assert theirs.tolist() == pytest.approx(alibi_slopes(heads), rel=1e-6)
    assert alibi_slopes(12)[8:] == pytest.approx([0.5**0.5, 0.5**1.5, 0.5**2.5, 0.5**3.5])


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (16, 64), (8, 20)])
def test_t5_buckets_are_transformers(buckets, most, two_sided):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-FAR if two_sided else 0, FAR + 1)  # a decoder never looks ahead
    options = {"bidirectional": two_sided, "num_buckets": buckets, "max_distance": most}
    theirs = T5Attention._relative_position_bucket(-distance, **options)  # theirs is key minus query
    assert torch.equal(T5Bias(1, buckets=buckets, max_distance=most, two_sided=two_sided).bucket(distance), theirs)


def fit(knots: list[float], target, bias: Fire) -> None:
    """Set FIRE's MLP to the piecewise linear function through target(x) at the knots x, which rise from 0."""
    values = [target(x) for x in knots]
    steps = [(b - a) / (y - x) for a, b, x, y in zip(values, values[1:], knots, knots[1:], strict=False)]
    with torch.no_grad():
        bias.up.fill_(1.0)
        for a in (bias.up_bias, bias.down):
            a.zero_()  # units that are not needed
        bias.up_bias[: len(steps)] = -torch.tensor(knots[:-1], dtype=torch.float64)
        turns = [a - b for a, b in zip(steps, [0.0, *steps], strict=False)]
        bias.down[0, : len(steps)] = torch.tensor(turns, dtype=torch.float64)
        bias.down_bias.fill_(values[0])


@pytest.mark.parametrize("kind", ["alibi", "kerple", "t5"])
def test_fire_represents_the_others(kind):
    """Constructed weights, at all pairs of positions 0 .. 2,048 that a causal mixer meets."""
    reach, tolerance = 2048, 0.02
    bias = Fire(1, hidden=64, c={"alibi": 1e-5, "kerple": 0.7, "t5": 1.0}[kind], threshold=float(reach)).double()
    far = math.log(bias.start_c * reach + 1) + 1e-6  # all rows share it
    t5 = built({"name": "t5", "init_std": 1.0}, 1)

    def wanted(ratio: float) -> float:
        n = math.expm1(ratio * far) / bias.start_c
        return -0.5 * n if kind == "alibi" else -0.9 * math.log1p(0.7 * n)

    if kind == "t5":  # constant up to the last distance of a bucket, then a step up to the next distance
        every = torch.arange(reach + 1)
        values = t5(every[None], torch.zeros(1, 1, dtype=torch.long), torch.float64)[0, 0, :, 0].detach()
        changes = [n for n in range(1, reach + 1) if values[n] != values[n - 1]]
        ends = sorted({0, *changes, *(n - 1 for n in changes), reach})
        scaled = {math.log(bias.start_c * n + 1) / far: float(values[n]) for n in ends}
        fit(list(scaled), scaled.__getitem__, bias)
        want = values
    else:
        fit([i / 64 for i in range(65)], wanted, bias)
        n = torch.arange(reach + 1, dtype=torch.float64)
        want = -0.5 * n if kind == "alibi" else -0.9 * torch.log1p(0.7 * n)
    for t in (reach, reach - 5, 1024, 100, 3, 0):
        got = bias(torch.tensor([[t]]), torch.arange(t + 1)[None], torch.float64)[0, 0, 0].flip(0)
        torch.testing.assert_close(got.detach(), want[: t + 1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("T", [1, 17, 1100])
@pytest.mark.parametrize("causal", [True, False])
def test_aft_full_with_alibi_is_a_recurrence(T, causal):
    """By the recurrence, as layer and stream, and by T x T pairs."""
    torch.manual_seed(0)
    spec = {"name": "alibi", "slope": 0.02, "learned": True}
    mixer = build_mixer("aft_full", 4, causal=causal, bias=spec).double()
    x = torch.randn(2, T, 4, dtype=torch.float64)
    args, options = mixer.functional_args(Inputs(x))
    want = mixer.out_proj(aft_full(*args, **options, backend="eager"))
    torch.testing.assert_close(mixer(x), want, rtol=0, atol=1e-12)
    mask = torch.rand(2, T, generator=torch.Generator().manual_seed(2)) > 0.3
    args, options = mixer.functional_args(Inputs(x, key_mask=mask))
    want = mixer.out_proj(aft_full(*args, **options, backend="eager"))
    torch.testing.assert_close(mixer(x, key_mask=mask), want, rtol=0, atol=1e-12)
    if causal:
        state, outputs = mixer.init_state(2), []
        for part in x.split(3, 1):
            y, state = mixer.extend(part, state)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 1), mixer(x), rtol=0, atol=1e-12)
        assert sum(a.numel() for a in state) == 2 * (3 * 4 + 2)


def test_a_bias_of_the_key_alone_is_another():
    """BLOOM's short cut, m s, needs rows whose keys all have it: those outside AFT-local's window have none."""
    q, k, v = (torch.randn(1, 12, 4, dtype=torch.float64) for _ in "qkv")
    taps = -0.5 * torch.arange(3, -1, -1, dtype=torch.float64)
    right = aft_local(q, k, v, taps, window=4, causal=True)
    keys = 0.5 * torch.arange(12, dtype=torch.float64)
    wrong = aft_local(q, k, v, keys.expand(12, 12).contiguous(), window=4, causal=True)
    assert float((right - wrong).abs().max()) > 1e-2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 4, 40])
def test_taps_are_a_table(causal, window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 23, 4, generator=generator) for _ in "qkv")
    taps = torch.randn(window if causal else 2 * window - 1, generator=generator).requires_grad_()
    far = torch.arange(23)[:, None] - torch.arange(23)
    table = taps[(window - 1 - far).clamp(0, len(taps) - 1)]
    options = {"window": window, "causal": causal}
    for backend in ("auto", "eager"):
        got, want = aft_local(q, k, v, taps, **options, backend=backend), aft_local(q, k, v, table, **options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        grads = (torch.autograd.grad(y.square().sum(), taps, retain_graph=True)[0] for y in (got, want))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    with pytest.raises(MixerError, match=r"aft_local: with window=.* taps, got"):
        aft_local(q, k, v, torch.zeros(len(taps) + 1), **options)


@pytest.mark.parametrize("causal", [True, False])
def test_long_sequences_are_weighed_row_by_row(causal):
    """Beyond 512 queries the bias is computed by blocks of rows, again in the backward pass."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1100, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    bias = built({"name": "fire", "hidden": 4}, 2)
    whole = bias((0, 1100), 1100, torch.float64)
    mask = torch.rand(1, 1100) > 0.2
    calls = []

    def rows(start: int, stop: int) -> torch.Tensor:
        calls.append((start, stop))
        return bias((start, stop), 1100, torch.float64)

    leaves = (q, k, v, *bias.parameters())
    options = {"heads": 2, "causal": causal, "key_mask": mask}
    want, got = (attend(q, k, v, w, **options) for w in (whole, rows))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert calls == [(0, 512), (512, 1024), (1024, 1100)]
    grads = (torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (got, want))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert len(calls) == 6


def test_memory_of_a_learned_bias_is_linear_in_the_rows():
    """What autograd keeps of 2,048 tokens is far below one number per pair and head."""
    mixer = build_mixer("attention", 16, heads=4, causal=True, bias={"name": "kerple"})
    x, seen = torch.randn(1, 2048, 16), {}

    def keep(a: torch.Tensor) -> torch.Tensor:
        seen[a.untyped_storage().data_ptr()] = a.untyped_storage().nbytes()
        return a

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda a: a):
        y = mixer(x)
    assert sum(seen.values()) < 4 * 2048 * 2048  # of 4 * 4 * 2048 * 2048 for the weights alone
    y.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in mixer.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stream_over_a_context_does_not_round_the_bias(dtype):
    """-100 in half precision is off by up to a quarter; the whole sequence weighs with float32."""
    torch.manual_seed(0)
    mixer = build_mixer("aft_full", 8, bias={"name": "alibi", "slope": 1.37}).to(dtype)
    x, context = torch.randn(1, 1, 8).to(dtype), torch.randn(1, 5, 8).to(dtype)
    at = torch.tensor([[200]])
    y, _ = mixer.extend(x, mixer.init_state(1, context=context), positions=at)
    torch.testing.assert_close(y, mixer(x, context, positions=at), rtol=0, atol=1e-3)


def test_a_model_without_a_longest_sequence():
    """AFT-full with a function as its bias, in a model: no max_len, and a stream equals the whole."""
    for spec in ({"name": "alibi", "slope": 0.1}, {"name": "fire"}):
        config = LMConfig(16, 8, ({"name": "aft_full", "bias": spec},), layers=2, positions=None)
        model = LM(config).eval()
        assert model.max_len is None
        tokens = torch.randint(0, 256, (2, 40))
        logits, _ = model.extend(tokens, model.init_state(2))
        torch.testing.assert_close(logits, model(tokens), rtol=1e-4, atol=1e-5)
        assert model.generate(tokens[:, :3], 12, temperature=0).shape == (2, 15)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("attention", {"bias": {"name": "alib"}}, r"Attention: bias must be \{\"name\": one of alibi, t5"),
        ("attention", {"bias": {"name": "fire", "width": 3}}, r"the options of 'fire' are hidden, c, threshold"),
        ("attention", {"bias": {"name": "t5", "buckets": 7}}, r"T5Bias: buckets must be even and at least 2"),
        ("attention", {"bias": {"name": "t5", "max_distance": 16}}, r"max_distance must exceed the 16 distances"),
        ("attention", {"bias": {"name": "alibi", "slope": -1.0}}, r"ALiBi: slope must be a positive number"),
        ("attention", {"bias": {"name": "sandwich", "dim": 3}}, r"Sandwich: dim must be an even number"),
        ("attention", {"bias": {"name": "fire", "c": float("nan")}}, r"Fire: c must be a positive number"),
        ("attention", {"bias": {"name": "kerple", "kind": "linear"}}, r"Kerple: kind must be 'log' or 'power'"),
        ("aft_full", {}, r"build_mixer: aft_full needs the option 'max_len'; its options are .*bias"),
        (
            "local",
            {"window": 4, "heads": 2, "bias": {"name": "fire"}},
            r"Local: .*its pattern takes biases by distance",
        ),
        ("aft_local", {"window": 0, "bias": {"name": "t5"}}, r"AFTLocal: .*window=0 has no bias"),
    ],
)
def test_bad_options_are_refused(name, options, why):
    with pytest.raises(MixerError, match=why):
        build_mixer(name, 8, causal=True, **({"heads": 2} if name == "attention" else {}), **options)


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_exported_programs_take_any_length(spec):
    mixer = build_mixer("attention", 8, heads=2, causal=True, bias=spec).eval()
    any_length = {"x": {1: torch.export.Dim("t", min=2, max=4096)}}
    program = torch.export.export(mixer, (torch.randn(1, 9, 8),), dynamic_shapes=any_length).module()
    for T in (2, 50, 700):
        x = torch.randn(1, T, 8)
        torch.testing.assert_close(program(x), mixer(x), rtol=1e-4, atol=1e-5)


def test_misfits_are_refused():
    with pytest.raises(MixerError, match="ALiBi: expects positions of queries and of keys both as tensors, or both as"):
        ALiBi(1)((0, 3), torch.arange(3)[None], torch.float32)
    with pytest.raises(MixerError, match="AFTFull: needs max_len, .* or a bias that is a function"):
        MIXERS["aft_full"](8)
    q = torch.randn(1, 4, 8)
    with pytest.raises(MixerError, match=r"attention: expects w \(1 or 1, 1 or 2, 4, 4\), got \(1, 3, 4, 4\)"):
        attend(q, q, q, torch.zeros(1, 3, 4, 4), heads=2)
    mixer = build_mixer("aft_full", 8, causal=True, bias={"name": "alibi"})
    with pytest.raises(MixerError, match="AFTFull: its bias is a function of positions, with nothing to resize"):
        mixer.resize(20)
    _, state = mixer.extend(torch.randn(1, 3, 8), mixer.init_state(1))
    with pytest.raises(MixerError, match="AFTFull: positions of valid tokens must be 0 or above and rise"):
        mixer.extend(torch.randn(1, 2, 8), state, positions=torch.tensor([[1, 2]]))


def test_every_bias_is_listed():
    assert {spec["name"] for spec in SPECS} == set(PAIR_POSITIONS)


FLOATS = torch.arange(5.0).expand(2, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LearnedPositions(8, max_len=9)(FLOATS), r"expects integer positions, got torch.float32"),
        (lambda: LearnedPositions(8, max_len=3)(FLOATS.long()), r"positions 0..2, got positions 0..4"),
        (lambda: LearnedPositions(8, max_len=9)(FLOATS.long() - 1), r"positions 0..8, got positions -1..3"),
        (lambda: T5Bias(2)(FLOATS, FLOATS.long(), torch.float32), r"T5Bias: expects integer positions, got"),
        (lambda: T5Bias(2)(FLOATS.cfloat(), FLOATS.long(), torch.float32), r"T5Bias: expects integer positions, got"),
        (lambda: Fire(2)(FLOATS.long(), None, torch.float32), r"Fire: expects positions of queries and of keys both"),
        (lambda: Fire(2)(FLOATS.bool(), FLOATS.bool(), torch.float32), r"Fire: expects integer positions, got"),
    ],
)
def test_positions_outside_of_a_table_or_no_integers_are_one_line(call, message):
    with pytest.raises(MixerError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_table_takes_integers_of_any_width():
    table = LearnedPositions(8, max_len=9)
    want = table(torch.arange(5))
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(table(torch.arange(5, dtype=dtype)), want)
