"""Test what is special to AFT-forget: the forms it contains, long texts and long half-lives, its options."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from tokenmix import MixerError, build_mixer, functional, use_backend
from tokenmix.functional.aft_forget import decayed_sums
from tokenmix.functional.short_conv import convolve_positions, short_conv_chunk
from tokenmix.kernels.cpu import decode
from tokenmix.mixers.parts.short_conv import ShortConv

HALF_LIVES = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6)


def drawn(T: int, D: int = 6, B: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(T)
    q, k, v, g = (torch.randn(B, T, D, generator=draw, dtype=dtype) for _ in range(4))
    return [q, k, v, -torch.nn.functional.softplus(g)]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 50])
class TestIdentities:
    @pytest.mark.parametrize("causal", [False, True])
    def test_without_decay_and_norm_it_is_aft_simple(self, T, causal):
        q, k, v, _ = drawn(T)
        same(
            functional.aft_forget(q, k, v, torch.zeros_like(k), causal=causal),
            functional.aft_simple(q, k, v, causal=causal),
        )

    @pytest.mark.parametrize("causal", [False, True])
    def test_a_constant_decay_is_aft_full_with_a_bias_by_distance(self, T, causal):
        q, k, v, _ = drawn(T)
        at = torch.arange(T, dtype=torch.float64)
        bias = -0.3 * (at[:, None] - at).abs()
        decayed = functional.aft_forget(q, k, v, torch.full_like(k, -0.3), causal=causal)
        same(decayed, functional.aft_full(q, k, v, bias, causal=causal))

    def test_it_is_aft_simple_on_integrated_keys(self, T):
        q, k, v, g = drawn(T)
        integrated = functional.aft_simple(q, k - g.cumsum(1), v, causal=True)
        same(functional.aft_forget(q, k, v, g, causal=True), integrated)

    def test_a_bonus_for_the_current_token_is_the_wkv_of_rwkv_4(self, T):
        """There the sums decay after they are read, so that the past is that of AFT-forget before its last decay."""
        _, k, v, _ = drawn(T)
        bonus, decay = math.exp(0.7), 0.4
        num = den = torch.zeros_like(k[:, 0])
        rows = []
        for t in range(T):
            own = torch.exp(k[:, t])
            rows.append((num + bonus * own * v[:, t]) / (den + bonus * own))
            num, den = math.exp(-decay) * num + own * v[:, t], math.exp(-decay) * den + own
        total = decayed_sums(k[:, None], v[:, None, :, None], torch.full_like(k, -decay)[:, None])
        sums = (torch.exp(total.m + total.lift)[..., None, :] * total.acc)[:, 0]
        own = torch.stack([torch.exp(k) * v, torch.exp(k)], 2)
        wkv = (sums - own) * math.exp(decay) + bonus * own
        same(wkv[:, :, 0] / wkv[:, :, 1], torch.stack(rows, 1))


@pytest.mark.parametrize("decay", [-1e30, -math.inf])
def test_a_token_that_forgets_all_is_the_first(decay):
    q, k, v, g = drawn(40)
    cut = g.clone()
    cut[:, 20] = decay
    y = functional.aft_forget(q, k, v, cut, causal=True)
    same(y[:, :20], functional.aft_forget(q, k, v, g, causal=True)[:, :20])
    same(y[:, 20:], functional.aft_forget(*(a[:, 20:] for a in (q, k, v, g)), causal=True))
    leaves = [a.float().requires_grad_() for a in (q, k, v, cut)]
    y32 = functional.aft_forget(*leaves, causal=True, backend="cpu")
    torch.testing.assert_close(y32.double(), y, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(y32[:, 20:].sum(), leaves)
    assert all(bool(a[:, :20].eq(0).all()) and bool(a.isfinite().all()) for a in grads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_minus_infinity_means_the_same_in_every_dtype(dtype, causal):
    """Keys of it weigh nothing, also if there are no others; a decay of it forgets all, twice and without a key too."""
    q, k, v, g = drawn(6, 2, 1)
    g[:, 2], g[:, 3], k[:, 3] = -math.inf, -math.inf, -math.inf
    k[:, 0], k[:, 5] = 6e4, -6e4  # all but the whole range of float16 apart, and yet forgotten
    g[:, 5] = -math.inf
    want = [v[:, 0], None, v[:, 2], None, v[:, 4], v[:, 5]]
    backends = ["eager", "cpu"] if causal and dtype != torch.float64 else ["eager"]
    for backend in backends:
        args = [a.to(dtype) for a in (q, k, v, g)]
        nothing = functional.aft_forget(*args[:1], torch.full_like(args[1], -math.inf), *args[2:], causal=causal)
        assert bool(nothing.eq(0).all())
        if not causal:
            continue
        y = functional.aft_forget(*args, causal=True, gate=None, backend=backend)
        for t, value in enumerate(want):
            if value is not None:
                torch.testing.assert_close(y[:, t], value.to(dtype))
        assert bool(y[:, 3].eq(0).all())


def test_no_gradient_passes_a_token_that_forgets_all_and_is_no_key():
    leaves = [a.float() for a in drawn(40)]
    leaves[3][:, 20], leaves[1][:, 20] = -math.inf, -math.inf
    for a in leaves:
        a.requires_grad_()
    y = functional.aft_forget(*leaves, causal=True, backend="cpu")
    assert bool(y[:, 20].eq(0).all())
    grads = torch.autograd.grad(y[:, 20:].sum(), leaves)
    assert all(bool(a[:, :20].eq(0).all()) and bool(a.isfinite().all()) for a in grads)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_100_000_tokens_with_half_lives_of_one_to_a_million(backend):
    """Against the recurrence, token by token, in float64: no digits are lost to running sums of decays."""
    T, D = 100_000, len(HALF_LIVES)
    q, k, v, _ = drawn(T, D, 1, torch.float32)
    v = v + 1.0
    g = (-math.log(2) / torch.tensor(HALF_LIVES)).expand(1, T, D).contiguous()
    y = functional.aft_forget(q, k, v, g, causal=True, gate=None, backend=backend).double()
    num = den = torch.zeros(D, dtype=torch.float64)
    fade, weight = torch.exp(g[0].double()), torch.exp(k[0].double())
    want = torch.empty(T, D, dtype=torch.float64)
    for t in range(T):
        num, den = fade[t] * num + weight[t] * v[0, t].double(), fade[t] * den + weight[t]
        want[t] = num / den
    assert float((y[0] - want).abs().max()) < 3e-6


def test_half_lives_at_the_start_are_those_that_were_asked_for():
    mixer = build_mixer("aft_forget", 32, causal=True, half_lives=(2.0, 128.0))
    lives = math.log(2) / torch.nn.functional.softplus(mixer.rate.detach().double())
    torch.testing.assert_close(lives[[0, -1]], torch.tensor([2.0, 128.0], dtype=torch.float64), rtol=1e-5, atol=0.0)
    ratios = lives[1:] / lives[:-1]
    assert float(ratios.max() - ratios.min()) < 1e-4


def test_a_fixed_decay_measures_positions():
    """Two texts packed with a gap of positions between their tokens decay over the gap."""
    torch.manual_seed(0)
    mixer = build_mixer("aft_forget", 8, causal=True, norm_heads=2, decay="fixed", kernel_size=1, half_lives=(1.0, 4.0))
    x = torch.randn(1, 6, 8)
    near, far = torch.arange(6)[None], torch.tensor([[0, 1, 2, 1003, 1004, 1005]])
    y = mixer(x, positions=far)
    torch.testing.assert_close(y[:, :3], mixer(x, positions=near)[:, :3])
    torch.testing.assert_close(y[:, 3:], mixer(x[:, 3:]))  # all before is forgotten


@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "options"), [("aft_reach", {"heads": 2}), ("aft_forget", {"decay": "fixed"})])
def test_decays_by_distance_refuse_positions_that_do_not_rise(name, options, causal, kernel_size):
    """Decays add up from token to token; those of a token that stands before the last one would have to be undone."""
    mixer = build_mixer(name, 8, causal=causal, kernel_size=kernel_size, **options)
    x, words = torch.randn(1, 4, 8), "positions of valid tokens must be 0 or above and rise along each row"
    with pytest.raises(MixerError, match=words):
        mixer(x, positions=torch.tensor([[0, 5, 3, 6]]))
    if causal:
        _, state = mixer.extend(x, mixer.init_state(1), positions=torch.tensor([[0, 2, 5, 7]]))
        with pytest.raises(MixerError, match=words):
            mixer.extend(x, state, positions=torch.tensor([[6, 8, 9, 10]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "new"), [(4, 1), (4, 3), (2, 5), (7, 2)])
def test_the_convolution_of_new_tokens_has_a_kernel(size, new, dtype):
    """With padding on the left, gaps between positions, and numbers that are not finite."""
    draw, width = torch.Generator().manual_seed(size), 70
    tokens = torch.randn(3, size - 1 + new, width, generator=draw).to(dtype)
    tokens[1, size - 2, 5], tokens[2, -1, 69] = math.inf, math.nan
    weight = torch.randn(width, size, generator=draw).to(dtype)
    weight[5] = 0.0
    positions = torch.randint(1, 3, tokens.shape[:2], generator=draw).cumsum(1)
    valid = torch.arange(tokens.shape[1]) >= torch.tensor([0, 1, size - 1])[:, None]
    past, chunk = ([a[:, at] for a in (tokens, valid, positions)] for at in (slice(size - 1), slice(size - 1, None)))
    found = {}
    for backend in ("eager", "auto"):
        with use_backend(backend), mock.patch.object(decode, "conv", wraps=decode.conv) as spy:
            given = [a.contiguous() for a in past]
            found[backend] = short_conv_chunk(chunk[0], weight, *chunk[1:], tuple(given))
        assert spy.called == (backend == "auto")
    (want, rest), (got, kept) = found["eager"], found["auto"]
    assert torch.equal(got.isnan(), want.isnan())
    assert bool(want.isnan().any())
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    for a, b in zip(kept, rest, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("gap", [0, 1])
def test_many_new_tokens_in_a_row_are_one_convolution(gap):
    """With padding in front of one row; one gap, and each tap is laid out. Gradients too."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randn(3, 43, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(43).repeat(3, 1)
    positions[2, 20:] += gap
    valid = torch.arange(43) >= torch.tensor([0, 1, 9])[:, None]
    past = tokens[:, :3], valid[:, :3], positions[:, :3]
    with mock.patch("tokenmix.functional.short_conv.convolve_positions", wraps=convolve_positions) as spy:
        y, _ = short_conv_chunk(tokens[:, 3:], weight, valid[:, 3:], positions[:, 3:], past)
    assert spy.called == bool(gap)
    want = torch.zeros_like(y)
    for j in range(4):  # as the equation says, token by token
        for t in range(3, 43):
            for b in range(3):
                near = (positions[b] == positions[b, t] - 3 + j) & valid[b]
                want[b, t - 3] = want[b, t - 3] + weight[:, j] * tokens[b, near].sum(0)
    same(y, want)
    for a, b in zip(*(torch.autograd.grad(r.square().sum(), (tokens, weight)) for r in (y, want)), strict=True):
        same(a, b)


def test_the_convolution_starts_as_the_identity():
    x = torch.randn(2, 9, 5)
    for size, causal in ((4, True), (3, False), (1, True)):
        conv = ShortConv(5, size, causal=causal)
        torch.testing.assert_close(conv(x), x)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"half_lives": (0.0, 10.0)}, "half_lives must be a positive number, got 0.0"),
        ({"half_lives": (1.0, -4.0)}, "half_lives must be a positive number, got -4.0"),
        ({"half_lives": (1.0, float("inf"))}, "half_lives must be"),
        ({"half_lives": (4096, 1)}, "half_lives must rise from the shortest to the longest"),
        ({"half_lives": 3.0}, "half_lives must be a pair"),
        ({"half_lives": (1e-4, 10.0)}, "half_lives must lie between 0.001 and 1e300 tokens, got 0.0001"),
        ({"half_lives": (1, 10**301)}, "half_lives must lie between 0.001 and 1e300 tokens"),
        ({"kernel_size": 4}, "kernel_size must be odd unless causal=True, got 4"),
        ({"kernel_size": 0}, "kernel_size must be"),
        ({"norm_heads": 3}, "norm_heads=3 must divide dim=8"),
        ({"norm_heads": 0}, "norm_heads=0"),
        ({"decay": "slow"}, "decay must be one of"),
        ({"key_norm": 1}, "key_norm must be True or False"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(MixerError) as refusal:
        build_mixer("aft_forget", 8, **options)
    assert words in str(refusal.value)
    assert str(refusal.value).startswith("AFTForget: ")
    assert "\n" not in str(refusal.value)


def test_bad_arguments_are_refused():
    q, k, v, g = drawn(5)
    for args, options, words in (
        ((q, k, v, g[:, :4]), {}, "expects q, k, v and g of one shape"),
        ((q, k, v, g), {"heads": 4}, "heads=4 must divide the 6 features"),
        ((q, k, v, g), {"key_mask": torch.ones(2, 5)}, "expects a bool key_mask"),
    ):
        with pytest.raises(MixerError, match=words):
            functional.aft_forget(*args, **options)
