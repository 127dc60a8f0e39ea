"""Test biases that read queries and keys, and xPOS: their closed forms, their refusals, and long sequences."""

from __future__ import annotations

import cmath

import pytest
import torch
from torch.autograd import gradcheck

from tokenmix import MixerError, build_mixer, reference
from tokenmix.mixers import Inputs
from tokenmix.positions import (
    AdaptivePositions,
    ContextualPositions,
    RotaryPositions,
    ShawPositions,
    XPositions,
    build_logit_bias,
)
from tokenmix.testing import perturb

HEADS, WIDTH, T, S = 3, 4, 5, 9
SPECS = [
    {"name": "shaw", "max_distance": 3},
    {"name": "cope", "longest": 4},
    {"name": "cape", "hidden": 6},
    {"name": "cape", "of": {"name": "fire", "hidden": 3, "threshold": 6.0}},
]
NAMES = ["shaw", "cope", "cape", "cape-fire"]


def built(spec: dict):
    torch.manual_seed(0)
    bias = build_logit_bias(spec, HEADS, WIDTH, causal=True, owner="test").double()
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    return bias


def inputs():
    """Queries and keys of two rows, their positions with gaps, and the pairs that a causal row with a mask sees."""
    torch.manual_seed(1)
    q, k = torch.randn(2, HEADS, T, WIDTH).double(), torch.randn(2, HEADS, S, WIDTH).double()
    cols = torch.stack([torch.arange(S), torch.tensor([0, 1, 2, 7, 8, 20, 21, 3000, 3001])])
    mask = torch.ones(2, S, dtype=torch.bool)
    mask[0, 4] = False
    seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)[None] & mask[:, None]
    return q, k, cols[:, S - T :], cols, seen


def closed(bias, q, k, rows, cols, seen) -> torch.Tensor:
    """The equation, with the parameters of a module."""
    if isinstance(bias, ShawPositions):
        return reference.shaw(q, rows, cols, vectors=bias.table).detach()
    if isinstance(bias, ContextualPositions):
        return reference.cope(q, k, seen, vectors=bias.table).detach()
    assert isinstance(bias, AdaptivePositions)
    mlp = {name: getattr(bias, name) for name in ("up", "up_bias", "down", "down_bias")}
    return reference.cape(q, k, bias.of(rows, cols, torch.float64), **mlp).detach()


def off(bias) -> float:
    """The largest difference to the equation among the pairs that are attended."""
    given = inputs()
    got = bias(*given).detach()
    return float((got - closed(bias, *given)).masked_fill(~given[-1][:, None], 0.0).abs().max())


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_is_its_closed_form(spec):
    assert off(built(spec)) < 1e-12


class MirroredShaw(ShawPositions):
    def forward(self, q, k, rows, cols, seen):
        return super().forward(q, k, -rows, -cols, seen)


class CopeOfTheFuture(ContextualPositions):
    def forward(self, q, k, rows, cols, seen):
        return super().forward(q, k, rows, cols, torch.ones_like(seen))


class CopeFromTheStart(ContextualPositions):
    def forward(self, q, k, rows, cols, seen):
        return super().forward(q, k.flip(2), rows, cols, seen.flip(2)).flip(-1)


class CapeWithoutLogits(AdaptivePositions):
    def forward(self, q, k, rows, cols, seen):
        return super().forward(q, 0 * k, rows, cols, seen)


@pytest.mark.parametrize("planted", [MirroredShaw, CopeOfTheFuture, CopeFromTheStart, CapeWithoutLogits])
def test_the_closed_form_tells_planted_bugs(planted):
    bias = planted(HEADS, WIDTH).double()
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    assert off(bias) > 1e-2


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_gradients(spec):
    bias = built(spec)
    names = [name for name, _ in bias.named_parameters()]
    q, k, *rest = inputs()
    ok = rest[-1][:, None]

    def run(q, k, *values):
        named = dict(zip(names, values, strict=True))
        return torch.func.functional_call(bias, named, (q, k, *rest)).masked_fill(~ok, 0.0)

    given = (q, k, *(p.detach() for p in bias.parameters()))
    assert gradcheck(run, tuple(a.clone().requires_grad_() for a in given))


def test_at_the_start_cope_and_cape_add_what_is_known():
    """CoPE adds nothing, and CAPE the bias that it adapts."""
    x = torch.randn(2, 20, 12)
    plain, cope = (
        build_mixer("attention", 12, heads=HEADS, causal=True, bias=bias) for bias in (None, {"name": "cope"})
    )
    cope.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(cope(x), plain(x))
    kerple, cape = (
        build_mixer("attention", 12, heads=HEADS, causal=True, bias={"name": name}) for name in ("kerple", "cape")
    )
    names = {name.replace("bias.raw", "bias.of.raw"): a for name, a in kerple.state_dict().items()}
    cape.load_state_dict(names, strict=False)
    torch.testing.assert_close(cape(x), kerple(x))


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_long_sequences_go_in_pieces_with_the_same_results_and_gradients(spec):
    from tokenmix.functional import attention as whole
    from tokenmix.mixers.parts import log_weights

    torch.manual_seed(0)
    mixer = perturb(build_mixer("attention", 8, heads=2, causal=True, bias=spec), seed=0).double()
    x = torch.randn(1, 600, 8, dtype=torch.float64)
    seen, grads = [], []
    for rows in (log_weights.ROWS, 1000):
        before, log_weights.ROWS = log_weights.ROWS, rows
        try:
            args, options = mixer.functional_args(Inputs(x))
        finally:
            log_weights.ROWS = before
        assert callable(args[3]) is (rows < 600)
        seen.append(whole(*args, **options))
        grads.append(torch.autograd.grad(seen[-1].square().sum(), [*mixer.bias.parameters(), mixer.k_proj.weight]))
    torch.testing.assert_close(*seen, rtol=1e-9, atol=1e-12)
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


def faded_score(xpos: XPositions, q, k, t: int, s: int) -> float:
    """The product of one query and one key with xPOS, pair by pair as complex numbers."""
    half, total = xpos.rotary_dim // 2, 0.0
    for m in range(half):
        theta = xpos.base ** (-2 * m / xpos.rotary_dim)
        zeta = (m / half + xpos.gamma) / (1 + xpos.gamma)
        a, b = (complex(float(z[m]), float(z[m + half])) for z in (q, k))
        turned = a * b.conjugate() * cmath.exp(1j * (t - s) * theta)
        total += turned.real * zeta ** ((t - s) / xpos.scale_base)
    return total


@pytest.mark.parametrize(("t", "s"), [(0, 0), (7, 0), (500, 470), (3000, 0), (1_000_000, 999_990), (10**6, 10**6 - 3)])
def test_xpos_is_its_closed_form_near_and_far(t, s):
    torch.manual_seed(0)
    xpos = XPositions(8, gamma=0.3, scale_base=100.0)
    q, k = torch.randn(2, 8).double()
    at = torch.tensor([[t]]), torch.tensor([[s]])
    middle = torch.tensor([(t + s) // 2])
    (rq,), (rk,) = xpos(at[0], q[None, None]), xpos(at[1], k[None, None])
    got = (
        xpos.decay_features(rq[:, None], at[0], middle, key=False)
        @ xpos.decay_features(rk[:, None], at[1], middle, key=True).mT
    )
    want = faded_score(xpos, q, k, t, s)
    assert float(got) == pytest.approx(want, rel=1e-5, abs=1e-9)


def test_xpos_without_a_decay_is_rotary():
    x = torch.randn(2, 30, 16)
    options = {"heads": 2, "causal": True}
    rotary = build_mixer("attention", 16, positions={"name": "rotary"}, **options)
    xpos = build_mixer("attention", 16, positions={"name": "xpos", "scale_base": 1e12}, **options)
    xpos.load_state_dict(rotary.state_dict())
    assert isinstance(xpos.positions, RotaryPositions)
    torch.testing.assert_close(xpos(x), rotary(x), rtol=1e-5, atol=1e-6)


def test_xpos_refuses_spans_beyond_its_range():
    half = build_mixer("attention", 8, heads=2, causal=True, positions={"name": "xpos"}).half()
    most = half.positions.longest(torch.float16)
    assert 2_000 < most < 4_000
    x = torch.randn(1, 2, 8, dtype=torch.float16)
    with pytest.raises(MixerError, match="xpos in float16 spans at most .* positions in one call, got 100,001"):
        half(x, positions=torch.tensor([[0, 100_000]]))
    state = half.init_state(1, dtype=torch.float16)
    for start in (0, 100_000, 1_000_000):  # a stream has no such limit: only the chunk's own span counts
        y, state = half.extend(x, state, positions=torch.tensor([[start, start + 1]]))
        assert bool(y.isfinite().all())


@pytest.mark.parametrize("bias", [None, {"name": "cape"}])
def test_the_widest_xpos_is_finite_with_masks_and_gradients(bias):
    """The products of early queries and late keys, which masks hide, must not overflow: inf - inf would be NaN."""
    mixer = build_mixer("attention", 8, heads=2, causal=True, positions={"name": "xpos", "scale_base": 8.0}, bias=bias)
    T = mixer.positions.longest(torch.float32)
    assert 300 < T < 1000
    x, mask = torch.randn(1, T, 8), torch.ones(1, T, dtype=torch.bool)
    mask[:, 3] = False
    for masks in ({}, {"key_mask": mask}, {"attn_mask": mask.expand(T, T)}):
        y = mixer(x, **masks)
        grads = torch.autograd.grad(y.square().sum(), list(mixer.parameters()))
        assert all(bool(a.isfinite().all()) for a in (y, *grads))


def test_xpos_refuses_keys_far_ahead_but_not_masked_ones():
    mixer = build_mixer("attention", 8, heads=2, causal=True, positions={"name": "xpos"})
    x, far, near = torch.randn(1, 1, 8), torch.tensor([[10**6]]), torch.tensor([[1]])
    for there in (True, False):
        _, state = mixer.extend(x, mixer.init_state(1), positions=far, key_mask=torch.tensor([[there]]))
        if there:
            with pytest.raises(MixerError, match="spans at most .* positions in one call, got 1,000,000"):
                mixer.extend(x, state, positions=near)
        else:
            y, _ = mixer.extend(x, state, positions=near)
            torch.testing.assert_close(y, mixer(x))


@pytest.mark.parametrize("spec", [*SPECS, {"name": "fire", "hidden": 4}], ids=[*NAMES, "fire"])
def test_autocast_leaves_biases_in_float32(spec):
    mixer = perturb(build_mixer("attention", 12, heads=HEADS, causal=True, bias=spec), seed=0).float()
    q, k = torch.randn(2, 1, HEADS, T, WIDTH)
    at = torch.arange(T)[None]
    options = {"plain": False, "key_mask": None}
    want = mixer._log_weights(q, k, at, at, **options)
    with torch.autocast("cpu", torch.bfloat16):
        got = mixer._log_weights(q, k, at, at, **options)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


def test_a_wide_xpos_stream_forgets_what_is_far():
    """A key 10^6 positions back has faded to nothing; it must give a logit of 0 and no NaN."""
    mixer = build_mixer("attention", 8, heads=2, causal=True, positions={"name": "xpos"}).double()
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    _, state = mixer.extend(x[:, :2], mixer.init_state(1, dtype=torch.float64))
    y, _ = mixer.extend(x[:, 2:], state, positions=torch.tensor([[10**6]]))
    v = mixer.v_proj(x)
    q, k = (mixer.q_proj(x)[:, 2:] * mixer.k_proj(x)[:, 2:]).unflatten(-1, (2, 4)).sum(-1), None
    own = (q * 4**-0.5).exp()  # its logit with itself; those of the two others are 0
    want = (v[:, :1] + v[:, 1:2]).unflatten(-1, (2, 4)) + own[..., None] * v[:, 2:].unflatten(-1, (2, 4))
    torch.testing.assert_close(y, mixer.out_proj((want / (2 + own[..., None])).flatten(-2)), rtol=1e-9, atol=1e-9)
    assert k is None


WRONG = {
    "unknown": ({"bias": {"name": "shaws"}}, "one of alibi, t5, kerple, sandwich, fire, shaw, cope, cape"),
    "an option": ({"bias": {"name": "shaw", "longest": 3}}, "the options of 'shaw' are max_distance, init_std"),
    "a range": ({"bias": {"name": "shaw", "max_distance": 0}}, "max_distance must be an integer >= 1, got 0"),
    "one vector": ({"bias": {"name": "cope", "longest": 1}}, "longest must be an integer >= 2, got 1"),
    "inside": ({"bias": {"name": "cape", "of": {"name": "alibis"}}}, "of must be"),
    "hidden": ({"bias": {"name": "cape", "hidden": 0}}, "hidden must be an integer >= 1, got 0"),
    "cope both ways": ({"bias": {"name": "cope"}, "causal": False}, "it needs causal=True"),
    "xpos both ways": ({"positions": {"name": "xpos"}, "causal": False}, "they need causal=True"),
    "xpos gamma": ({"positions": {"name": "xpos", "gamma": 0}}, "gamma must be a positive number, got 0"),
    "xpos option": ({"positions": {"name": "xpos", "zeta": 1}}, "the options of 'xpos' are gamma, scale_base"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_options_are_one_line(name):
    options, message = WRONG[name]
    with pytest.raises(MixerError, match=message) as error:
        build_mixer("attention", 12, **{"heads": 3, "causal": True, **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mixer", ["local", "aft_conv"])
def test_windows_refuse_biases_that_are_not_by_distance(mixer):
    options = {"local": {"window": 3, "heads": 2}, "aft_conv": {"kernel_size": 3, "heads": 2}}[mixer]
    for bias, message in (({"name": "fire"}, "takes biases by distance"), ({"name": "shaw"}, "bias must be")):
        with pytest.raises(MixerError, match=message):
            build_mixer(mixer, 8, **options, bias=bias)
    if mixer == "aft_conv":
        with pytest.raises(MixerError, match="it needs ndim=1, got 2"):
            build_mixer(mixer, 8, **options, ndim=2, bias={"name": "alibi"})


@pytest.mark.parametrize("causal", [False, True])
def test_a_wide_window_with_a_bias_is_attention_with_it(causal):
    """Local attention whose window holds everything, and AFT-conv beside AFT-full."""
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    bias = {"name": "kerple"}
    wide = build_mixer("local", 8, heads=2, window=11, causal=causal, bias=bias).double()
    full = build_mixer("attention", 8, heads=2, causal=causal, bias=bias).double()
    full.load_state_dict(wide.state_dict())
    torch.testing.assert_close(wide(x), full(x), rtol=1e-9, atol=1e-11)
    conv = build_mixer("aft_conv", 8, heads=1, kernel_size=21, causal=causal, bias=bias).double()
    aft = build_mixer("aft_full", 8, causal=causal, bias=bias).double()
    state = conv.state_dict() | {
        "k_proj.weight": conv.k_proj.weight.expand(8, -1),
        "k_proj.bias": conv.k_proj.bias.expand(8),
    }
    aft.load_state_dict(state)
    torch.testing.assert_close(conv(x), aft(x), rtol=1e-9, atol=1e-11)
